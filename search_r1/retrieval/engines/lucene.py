"""BM25 over a Lucene index, such as the published one of wiki-18, with pyserini's Anserini.

Only pyserini's Java library is used, since its Python modules would import torch and others. The
passages come from the index if it stores them, else from the corpus, where a docid is a row number.
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

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.engines.java import bundled_java, choose_java
from search_r1.retrieval.engines.registry import lucene_folder
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.manifest import open_corpus
from search_r1.retrieval.schema import Document, Hit, well_formed
from search_r1.retrieval.settings import RetrieverConfig

logger = logging.getLogger(__name__)

K1, B = 0.9, 0.4
"""Defaults of pyserini, with which the published results were obtained."""
MAX_CLAUSES = 1 << 20
"""Maximum number of different words in a query. Lucene's default of 1,024 rejects long queries."""
BUILD_HINT = (
    "expected the folder of a Lucene index: give the published one, or build one with `python -m "
    "pyserini.index.lucene --collection JsonCollection --input <folder with the jsonl> --index "
    "<folder> --generator DefaultLuceneDocumentGenerator --threads 1 --storeRaw`"
)

ReadDocument = Callable[[Any], Document]
"""Converts a Java `ScoredDoc` to its passage."""


class LuceneRetriever:
    """BM25 ranking of documents that share a word stem with the query; ties by docid, as text."""

    name = "lucene"
    num_threads = 1

    def __init__(self, index: Any, read: ReadDocument, facts: dict[str, Any]) -> None:
        """`index`: a Java `SimpleSearcher`; `facts`: further entries of `info()`."""
        self._index = index
        self._read = read
        self._facts = facts
        self.num_documents = int(index.get_total_num_docs())
        self._new_list = _java("java.util.ArrayList")
        index.set_bm25(K1, B)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return at most `k` hits per query, best first; the queries share the machine's cores."""
        with stage("search"):
            results = self._search_all(queries, min(k, max(1, self.num_documents)))
        with stage("documents"):
            return [[Hit(self._read(hit), float(hit.score)) for hit in hits] for hits in results]

    def _search_all(self, queries: Sequence[str], k: int) -> list[Any]:
        if len(queries) < 2:  # batch_search would start a thread pool
            return [self._index.search(well_formed(query), k) for query in queries]
        texts, keys = self._new_list(), self._new_list()
        for i, query in enumerate(queries):
            texts.add(well_formed(query))
            keys.add(str(i))
        num_threads = min(len(queries), os.cpu_count() or 1)
        results = self._index.batch_search(texts, keys, k, num_threads)
        return [results.get(str(i)) for i in range(len(queries))]

    def info(self) -> dict[str, Any]:
        parameters = {"k1": K1, "b": B, "num_documents": self.num_documents}
        return {"engine": self.name, **parameters, **self._facts}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """Open the index, and the corpus if the index stores no passages; raises SearchError."""
    folder = _locate(config.index_path)
    index = _open_index(folder)
    facts: dict[str, Any] = {"index": _fingerprint(folder)}
    field = _stored_field(index, folder)
    if field is not None:
        return LuceneRetriever(index, STORED[field], facts | {"documents": field})
    corpus = _open_index_corpus(config, index, folder)
    facts |= {"documents": "corpus", "corpus": asdict(corpus.fingerprint)}
    return LuceneRetriever(index, lambda hit: _corpus_document(corpus, folder, hit.docid), facts)


def _locate(index_path: str | None) -> Path:
    """Return the folder with Lucene's files: `index_path` or the `bm25` inside it."""
    if index_path is None:
        raise SetupError("--retriever_name lucene without --index_path; " + BUILD_HINT)
    folder = lucene_folder(Path(index_path))
    if folder is None:
        raise SetupError(f"{index_path} has no segments_* file; {BUILD_HINT}")
    return folder


def _java(name: str) -> Any:
    """Return a Java class; the first call chooses a Java runtime and starts the JVM."""
    if not jnius_config.vm_running:
        _configure()
    import jnius  # noqa: PLC0415  (importing it starts the JVM)

    return jnius.autoclass(name)


def _configure() -> None:
    """Set the Java runtime, options and class path with which pyjnius will start the JVM."""
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
    """Open the index with Anserini; raises SetupError if this Lucene version cannot read it."""
    open_searcher = _java("io.anserini.search.SimpleSearcher")
    from jnius import JavaException  # noqa: PLC0415  (needs the JVM of `_java`)

    try:
        index = open_searcher(str(folder))
    except JavaException as error:
        raise SetupError(
            f"Lucene cannot open the index {folder} ({error}); expected an index that pyserini "
            "wrote: copy or build it again"
        ) from error
    _java("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_CLAUSES)
    return index


def _fingerprint(folder: Path) -> str:
    """Return a hash (hex) of the newest segments file, which has the random id of every segment."""
    segments = folder.glob("segments_*")
    newest = max(segments, key=lambda path: int(path.name.removeprefix("segments_"), 36))
    return hashlib.blake2b(newest.read_bytes(), digest_size=8).hexdigest()


def _stored_field(index: Any, folder: Path) -> str | None:
    """Return the stored field with the passages, or None if the index stores none."""
    if index.get_total_num_docs() == 0:
        raise SetupError(f"the index {folder} has no documents; build it again")
    first = index.doc(0)
    return next((name for name in STORED if first.get(name) is not None), None)


def _raw(hit: Any) -> Document:
    row = json.loads(hit.lucene_document.get("raw"))
    return Document.from_mapping({**row, "id": hit.docid})


def _contents(hit: Any) -> Document:
    return Document.from_contents(hit.docid, hit.lucene_document.get("contents"))


STORED: dict[str, ReadDocument] = {"raw": _raw, "contents": _contents}
"""Functions that read a passage, by the name of the stored field."""


def _open_index_corpus(config: RetrieverConfig, index: Any, folder: Path) -> Corpus:
    """Open the corpus and check it against the first and the last document of the index."""
    if config.corpus_path is None:
        raise SetupError(
            f"the index {folder} stores no passages; expected --corpus_path with the jsonl "
            "corpus that it was built from, or an index that was built with --storeRaw"
        )
    corpus = open_corpus(config)
    num_documents = int(index.get_total_num_docs())
    if num_documents > len(corpus):
        raise IndexMismatch(
            f"the index {folder} has {num_documents} documents, but {corpus.path} has "
            f"{len(corpus)}; give the corpus that it was built from as --corpus_path"
        )
    for number in (0, num_documents - 1):
        _corpus_document(corpus, folder, index.doc(number).get("id"))
    return corpus


def _corpus_document(corpus: Corpus, folder: Path, docid: str) -> Document:
    """Return the corpus row whose number is `docid`; raises IndexMismatch if its id differs."""
    row = int(docid) if docid.isdecimal() else len(corpus)
    document = corpus[row] if row < len(corpus) else None
    if document is None or document.id != docid:
        got = "no such row" if document is None else f"the id {document.id!r} there"
        raise IndexMismatch(
            f"the index {folder} has a document {docid!r}, but {corpus.path} has {got}; expected "
            "the corpus it was built from, with row numbers (from 0) as ids: give that corpus, or "
            "build the index with --storeRaw, which needs no corpus"
        )
    return document
