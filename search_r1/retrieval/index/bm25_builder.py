"""Builds a bm25s index of a corpus; shards of tokenised documents survive a killed build.

Words are numbered by their first appearance, so the index does not depend on the shards.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import bm25s
import numpy as np
import numpy.typing as npt
from bm25s.tokenization import Tokenized

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.fields import read_fields, save_fields
from search_r1.retrieval.index import build_folder
from search_r1.retrieval.index.build_folder import utc_now
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.script_words import SHARE, other_share, warn_of_corpus
from search_r1.retrieval.tokenization import FOLDED, SCRIPTS, tokenize
from verl.files import atomic_write

logger = logging.getLogger(__name__)

TOKENIZER = "words of two characters or more, folded, without English stop words"
MADE_WITH = f"bm25s {bm25s.__version__}"

Ids = npt.NDArray[np.int32]


class TokenizedRows(NamedTuple):
    """The words of consecutive documents."""

    ids: Ids
    """(num_words,) indices into `words`, document after document."""
    lengths: Ids
    """(num_documents,) number of words of each document."""
    words: list[str]
    """The distinct words in the order of their first appearance."""


class WordIds(Sequence[list[int]]):
    """Word ids of documents, made into lists one by one, since all lists take much memory."""

    def __init__(self, shards: list[tuple[Ids, Ids]]) -> None:
        """`shards`: `ids` (numbered over all shards) and `lengths` of each shard."""
        self._shards = shards

    def __len__(self) -> int:
        return sum(len(lengths) for _, lengths in self._shards)

    def __iter__(self) -> Iterator[list[int]]:
        for ids, lengths in self._shards:
            start = 0
            for length in lengths.tolist():
                yield ids[start : start + length].tolist()
                start += length

    def __getitem__(self, row: object) -> list[int]:  # type: ignore[override]
        raise TypeError("documents are read in order")


def build(config: BuildConfig, corpus: Corpus, folder: Path) -> None:
    """Index all documents; raises CorpusError for a malformed row."""
    if config.faiss_type != "Flat":
        raise SetupError(
            f"--faiss_type {config.faiss_type} with --retrieval_method bm25; expected a name for "
            "a dense index, for example --retrieval_method e5 --model_path intfloat/e5-base-v2"
        )
    analyzer = choose_analyzer(corpus, config.analyzer)
    tokenizer = TOKENIZER if analyzer == FOLDED else analyzer
    key = {"corpus": asdict(corpus.fingerprint), "tokenizer": tokenizer}
    with build_folder.work_folder(folder, key | {"shard_rows": config.shard_rows}) as work:
        build_folder.check_disk(work, 2 * corpus.fingerprint.size, "at most twice the corpus")
        if not any(work.glob("words-*")):
            corpus.check_rows(whole=True)
        fields = read_fields(corpus, config.filter_fields)
        tokens = merge_shards(_tokenize_corpus(corpus, work, config.shard_rows, analyzer))
        index = bm25s.BM25()
        index.index(tokens, show_progress=sys.stderr.isatty())
        ready = build_folder.fresh_folder(work / build_folder.READY_NAME)
        index.save(ready, show_progress=False)
        save_fields(fields, ready)
        Manifest(
            "bm25", corpus.fingerprint, len(corpus), created=utc_now(), made_with=MADE_WITH,
            analyzer=analyzer, filter_fields=config.filter_fields,
        ).save(ready)  # fmt: skip
        build_folder.publish(work, folder)


def merge_shards(shards: Iterator[TokenizedRows]) -> Tokenized:
    """Return the documents of all shards, with one number for each word over all of them."""
    vocab: dict[str, int] = {}
    documents = []
    for shard in shards:
        numbers = [vocab.setdefault(word, len(vocab)) for word in shard.words]
        documents.append((np.array(numbers, dtype=np.int32)[shard.ids], shard.lengths))
    if not vocab:
        vocab[""] = 0  # bm25s needs at least one word
    return Tokenized(WordIds(documents), vocab)


def _tokenize_corpus(
    corpus: Corpus, work: Path, shard_rows: int, analyzer: str
) -> Iterator[TokenizedRows]:
    """Yield all shards in order; those that an earlier run saved are not tokenised again."""
    with progress("tokenise", "documents", len(corpus)) as report:
        for start in range(0, len(corpus), shard_rows):
            rows = range(start, min(start + shard_rows, len(corpus)))
            path = work / f"words-{start:010d}.npz"
            if not path.exists():
                texts = [document.contents for document in corpus.documents(rows)]
                shard = make_shard(tokenize(texts, analyzer))
                words = np.frombuffer(json.dumps(shard.words).encode(), dtype=np.uint8)
                with atomic_write(path, is_durable=True) as part, part.open("wb") as file:
                    np.savez(file, ids=shard.ids, lengths=shard.lengths, words=words)
            yield _load_shard(path)
            report(rows.stop)


def make_shard(documents: list[list[str]]) -> TokenizedRows:
    """Number the words of documents by their first appearance."""
    vocab: dict[str, int] = {}
    ids = [vocab.setdefault(word, len(vocab)) for words in documents for word in words]
    lengths = np.array([len(words) for words in documents], dtype=np.int32)
    return TokenizedRows(np.array(ids, dtype=np.int32), lengths, list(vocab))


def _load_shard(path: Path) -> TokenizedRows:
    with np.load(path, allow_pickle=False) as arrays:
        return TokenizedRows(
            arrays["ids"], arrays["lengths"], json.loads(arrays["words"].tobytes())
        )


def choose_analyzer(corpus: Corpus, wanted: str | None) -> str:
    """Return the analyzer that is wanted, or else the one that fits the corpus; warns of a misfit.

    Latin text has the same words under both, so one passage of a hundred decides.
    """
    share = other_share(corpus)
    fitting = SCRIPTS if share >= SHARE else FOLDED
    if wanted is None and fitting == SCRIPTS:
        logger.info("%.0f %% of the passages of %s are in scripts without spaces or with vowel "
                    "signs: --analyzer scripts", 100 * share, corpus.path)  # fmt: skip
    if wanted not in (None, SCRIPTS):
        warn_of_corpus(corpus, share)
    return wanted or fitting
