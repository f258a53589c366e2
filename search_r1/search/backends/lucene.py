"""BM25 over a Lucene index, such as the published one of wiki-18, through pyserini's Anserini.

Only pyserini's Java library is used: its Python modules would load torch and others. The passages
come from the index if it stores them, else from the corpus, where a docid is a row number.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jnius_config
import pyserini

from search_r1.search.backends.base import Retriever, stage
from search_r1.search.backends.java import bundled_java, choose_java
from search_r1.search.backends.registry import lucene_folder
from search_r1.search.corpus import Corpus
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.manifest import check_files, open_corpus
from search_r1.search.schema import Document, Hit, well_formed
from search_r1.search.settings import RetrieverConfig

logger = logging.getLogger(__name__)

K1, B = 0.9, 0.4
"""pyserini's defaults, which the published results were made with."""
MAX_CLAUSES = 1 << 20
"""Different words of a query; Lucene's own limit of 1,024 is an error for a long one."""
BUILD_HINT = (
    "expected the folder of a Lucene index: give the published one, or build one with `python -m "
    "pyserini.index.lucene --collection JsonCollection --input <folder with the jsonl> --index "
    "<folder> --generator DefaultLuceneDocumentGenerator --threads 1 --storeRaw`"
)

ReadDocument = Callable[[Any], Document]
"""A Java `ScoredDoc` to its passage."""


class LuceneRetriever:
    """Ranks documents that share a word stem with the query; ties by docid, as text."""

    name = "lucene"
    num_threads = 1

    def __init__(self, index: Any, read: ReadDocument, facts: dict[str, Any]) -> None:
        """`index`: a Java `SimpleSearcher`; `facts`: where passages come from, and hashes."""
        self._index = index
        self._read = read
        self._facts = facts
        self.num_documents = int(index.get_total_num_docs())
        self._new_list = _java("java.util.ArrayList")
        index.set_bm25(K1, B)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first; the queries share the machine's cores."""
        with stage("search"):
            found = self._search_all(queries, min(k, max(1, self.num_documents)))
        with stage("documents"):
            return [[Hit(self._read(hit), float(hit.score)) for hit in hits] for hits in found]

    def _search_all(self, queries: Sequence[str], k: int) -> list[Any]:
        """A list of Java `ScoredDoc` per query; a pool of threads is made for several."""
        if len(queries) < 2:
            return [self._index.search(well_formed(query), k) for query in queries]
        texts, keys = self._new_list(), self._new_list()
        for place, query in enumerate(queries):
            texts.add(well_formed(query))
            keys.add(str(place))
        num_threads = min(len(queries), os.cpu_count() or 1)
        found = self._index.batch_search(texts, keys, k, num_threads)
        return [found.get(str(place)) for place in range(len(queries))]

    def info(self) -> dict[str, Any]:
        """Engine, its parameters, the index and where its passages come from."""
        parameters = {"k1": K1, "b": B, "num_documents": self.num_documents}
        return {"engine": self.name, **parameters, **self._facts}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The index at `index_path`, and the corpus if it stores no passages; raises SearchError."""
    folder = _locate(config.index_path)
    check_files(config, folder, None)
    index = _open_index(folder)
    facts: dict[str, Any] = {"index": _fingerprint(folder)}
    name = _stored_field(index, folder)
    if name is not None:
        return LuceneRetriever(index, STORED[name], facts | {"documents": name})
    corpus = _open_its_corpus(config, index, folder)
    facts |= {"documents": "corpus", "corpus": asdict(corpus.fingerprint)}
    return LuceneRetriever(index, lambda hit: _row(corpus, folder, hit.docid), facts)


def _locate(index_path: str | None) -> Path:
    """The folder with Lucene's files: `index_path` or the `bm25` inside it."""
    if index_path is None:
        raise SetupError("--retriever_name lucene without --index_path; " + BUILD_HINT)
    folder = lucene_folder(Path(index_path))
    if folder is None:
        raise SetupError(f"{index_path} has no segments_* file; {BUILD_HINT}")
    return folder


def _java(name: str) -> Any:
    """A Java class; the first one starts the JVM, with the Java that was chosen for it."""
    if not jnius_config.vm_running:
        _configure()
    import jnius  # noqa: PLC0415  (importing it starts the JVM)

    return jnius.autoclass(name)


def _configure() -> None:
    """Tell pyjnius which Java, options and classes to start with."""
    java = choose_java(os.environ.get("JAVA_HOME"), bundled_java())
    jars = Path(str(pyserini.__file__)).parent / "resources" / "jars"
    libraries = sorted(map(str, jars.glob("anserini-*-fatjar.jar")))
    if not libraries:
        raise SetupError(
            f"pyserini has no anserini-*-fatjar.jar in {jars}; install it again: "
            "pip install --force-reinstall pyserini"
        )
    os.environ["JAVA_HOME"] = str(java.home)
    jnius_config.set_options(*java.options)
    jnius_config.add_classpath(libraries[-1])
    logger.info("Lucene runs on Java %d of %s", java.version, java.home)


def _open_index(folder: Path) -> Any:
    """Anserini's searcher; raises SetupError for an index that this Lucene cannot read."""
    open_searcher = _java("io.anserini.search.SimpleSearcher")
    from jnius import JavaException  # noqa: PLC0415  (only after the JVM has its options)

    try:
        index = open_searcher(str(folder))
    except JavaException as error:
        raise SetupError(
            f"Lucene cannot open the index {folder} ({error}); expected one that pyserini "
            "wrote: copy or build it again"
        ) from error
    _java("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_CLAUSES)
    return index


def _fingerprint(folder: Path) -> str:
    """Hash (hex) of the newest segments file, which holds the random id of every segment."""
    segments = folder.glob("segments_*")
    newest = max(segments, key=lambda path: int(path.name.removeprefix("segments_"), 36))
    return hashlib.blake2b(newest.read_bytes(), digest_size=8).hexdigest()


def _stored_field(index: Any, folder: Path) -> str | None:
    """The stored field that has the passages; None if they are only indexed."""
    if index.get_total_num_docs() == 0:
        raise SetupError(f"the index {folder} has no documents; build it again")
    first = index.doc(0)
    return next((name for name in STORED if first.get(name) is not None), None)


def _raw(hit: Any) -> Document:
    """The passage of the row that the index stores as it was in the corpus."""
    row = json.loads(hit.lucene_document.get("raw"))
    return Document.from_mapping({**row, "id": hit.docid})


def _contents(hit: Any) -> Document:
    """The passage of the contents that the index stores."""
    return Document.from_contents(hit.docid, hit.lucene_document.get("contents"))


STORED: dict[str, ReadDocument] = {"raw": _raw, "contents": _contents}
"""Readers by the field that `--storeRaw` or `--storeContents` wrote."""


def _open_its_corpus(config: RetrieverConfig, index: Any, folder: Path) -> Corpus:
    """The corpus, checked against the first and the last document of the index."""
    if config.corpus_path is None:
        raise SetupError(
            f"the index {folder} stores no passages; expected --corpus_path with the jsonl "
            "corpus that it was built from, or an index that was built with --storeRaw"
        )
    corpus, num_documents = open_corpus(config), int(index.get_total_num_docs())
    if num_documents > len(corpus):
        raise IndexMismatch(
            f"the index {folder} has {num_documents} documents, but {corpus.path} has "
            f"{len(corpus)}; give the corpus that it was built from as --corpus_path"
        )
    for place in (0, num_documents - 1):
        _row(corpus, folder, index.doc(place).get("id"))
    return corpus


def _row(corpus: Corpus, folder: Path, docid: str) -> Document:
    """The corpus row whose number is the docid; raises IndexMismatch if it has another id."""
    row = int(docid) if docid.isdecimal() else len(corpus)
    document = corpus[row] if row < len(corpus) else None
    if document is None or document.id != docid:
        got = "no such row" if document is None else f"the id {document.id!r} there"
        raise IndexMismatch(
            f"the index {folder} has a document {docid!r}, but {corpus.path} has {got}; expected "
            "the corpus it was built from, with row numbers (from 0) as ids: give that one, or "
            "build the index with --storeRaw, which needs no corpus"
        )
    return document
