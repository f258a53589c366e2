"""An index whose rows are not those of the corpus is refused; whatever rightly fits is served."""

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.faiss_index import FaissIndex
from search_r1.retrieval.engines.own_rows import check_own_rows, sample_rows
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.settings import EncoderConfig, FaissConfig, RetrieverConfig, TorchConfig
from tests.retrieval.conftest import write_corpus

COUNT = 300
WORDS = [f"word{i}" for i in range(200)]
NUMBERS = np.arange(COUNT)
KINDS = (
    "Flat", "HNSW16", "NSG16,Flat", "SQ8", "SQ4", "SQfp16", "PQ32x4np", "PQ16x4np", "PQ32x4fs",
    "RaBitQ", "IVF16,Flat", "IVF16,PQ32x4fs", "IVF16_HNSW4,SQ8", "PCA32,Flat",
    "PCA48,IVF4,PQ24x4np", "PQ16x4np,RFlat",
)  # fmt: skip
ORDERS = {
    "reversed": NUMBERS[::-1],
    "one on": np.roll(NUMBERS, 1),
    "halves": np.roll(NUMBERS, COUNT // 2),
    "as text": np.array(sorted(NUMBERS, key=str)),
    "shuffled": np.random.default_rng(0).permutation(COUNT),
    "one missing": np.append(np.delete(NUMBERS, 130), 0),
}


def texts(count: int = COUNT) -> list[tuple[str, str]]:
    rng = random.Random(0)
    return [(f"Title {i}", " ".join(rng.choices(WORDS, k=30))) for i in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Passages of different words."""
    return Corpus.open(write_corpus(tmp_path_factory.mktemp("own") / "corpus.jsonl", texts()))


def passages(corpus: Corpus) -> Vectors:
    return HashEncoder().encode_passages([document.contents for document in corpus])


def opened(vectors: Vectors, kind: str, folder: Path, metric: int = 0, **options: int) -> Any:
    index = faiss.index_factory(vectors.shape[1], kind, metric)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(folder / "index"))
    return FaissIndex.open(folder / "index", FaissConfig(**options))


class LongEncoder(HashEncoder):
    """Vectors of unequal lengths, as of DPR."""

    normalizes = False

    def _encode(self, text: str) -> Vectors:
        length = np.float32(1 + len(text) % 7 / 3)
        return super()._encode(text) * length


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        *itertools.product(["Flat", "HNSW16", "SQ8"], ORDERS),
        # Of coarse vectors only, most rows must be others.
        *itertools.product(["IVF4,PQ32x4np"], ["reversed", "one on", "halves", "shuffled"]),
    ],
)
def test_rows_in_another_order_are_refused(
    kind: str, order: str, corpus: Corpus, tmp_path: Path
) -> None:
    """Also if only a later part is out of order, and if vectors are coarse."""
    index = opened(passages(corpus)[ORDERS[order]], kind, tmp_path)
    with pytest.raises(IndexMismatch, match=r"document '.*expected .*index_builder"):
        check_own_rows("e5", tmp_path, index, corpus, HashEncoder())


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        *itertools.product(KINDS, [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2]),
        ("LSH", faiss.METRIC_L2),
        ("IMI2x2,Flat", faiss.METRIC_L2),
    ],
)
def test_every_kind_that_fits_is_served(
    kind: str, metric: int, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Coarse codes, and few lists searched, do not look like another order."""
    caplog.set_level(logging.INFO)
    index = opened(passages(corpus), kind, tmp_path, metric)
    check_own_rows("e5", tmp_path, index, corpus, HashEncoder())
    assert "8 of 8 sampled documents find" in caplog.text


def test_vectors_of_unequal_lengths_are_served(corpus: Corpus, tmp_path: Path) -> None:
    """A long vector can fit a passage better than its own; another order is found all the same."""
    vectors = LongEncoder().encode_passages([document.contents for document in corpus])
    index = opened(vectors, "Flat", tmp_path)
    check_own_rows("dpr", tmp_path, index, corpus, LongEncoder())
    index = opened(vectors[::-1].copy(), "Flat", tmp_path)
    with pytest.raises(IndexMismatch):
        check_own_rows("dpr", tmp_path, index, corpus, LongEncoder())


def test_vectors_of_shortened_texts_are_served(corpus: Corpus, tmp_path: Path) -> None:
    """An index may have been made of the beginnings of long passages."""
    starts = [document.contents[: len(document.contents) // 2] for document in corpus]
    index = opened(HashEncoder().encode_passages(starts), "Flat", tmp_path)
    check_own_rows("e5", tmp_path, index, corpus, HashEncoder())


@pytest.mark.parametrize("copies", [2, 40])
def test_copies_of_texts_are_served(copies: int, tmp_path: Path) -> None:
    """Equal texts rank by row, so that most of them are not the first hit."""
    corpus = Corpus.open(write_corpus(tmp_path / "corpus.jsonl", texts(8) * copies))
    index = opened(passages(corpus), "Flat", tmp_path)
    check_own_rows("e5", tmp_path, index, corpus, HashEncoder())


def test_texts_without_a_vector_of_their_own_are_served(tmp_path: Path) -> None:
    """Nothing can be said of vectors that are zero or all equal."""
    for rows in ([("", "")] * 3, [("", f"{i}") for i in range(30)]):
        corpus = Corpus.open(write_corpus(tmp_path / f"{len(rows)}.jsonl", rows))
        encoder = HashEncoder(1)
        vectors = encoder.encode_passages([document.contents for document in corpus])
        index = opened(vectors, "Flat", tmp_path)
        check_own_rows("e5", tmp_path, index, corpus, encoder)


def test_one_document_that_is_elsewhere_is_a_warning(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a near copy; two are an error."""
    vectors = passages(corpus)
    vectors[[0, 1]] = vectors[[1, 0]]
    check_own_rows("e5", tmp_path, opened(vectors, "Flat", tmp_path), corpus, HashEncoder())
    assert "'d0' (row 0, from 0) in row 1; 1 of 8 sampled" in caplog.text
    vectors[[-1, -2]] = vectors[[-2, -1]]
    with pytest.raises(IndexMismatch, match="2 of 8"):
        check_own_rows("e5", tmp_path, opened(vectors, "Flat", tmp_path), corpus, HashEncoder())


def test_another_encoder_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    """A bare file says only how many dimensions it has, which two encoders may share."""
    rng = np.random.default_rng(0)
    mixing = np.linalg.qr(rng.standard_normal((64, 64)))[0].astype(np.float32)
    index = opened(passages(corpus) @ mixing, "Flat", tmp_path)
    with pytest.raises(IndexMismatch):
        check_own_rows("e5", tmp_path, index, corpus, HashEncoder())


@pytest.mark.parametrize("engine", ["faiss", "torch"])
def test_a_server_refuses_a_bare_file_of_another_order(engine: str, tmp_path: Path) -> None:
    """Both engines, before anything is served; eight documents are enough."""
    corpus = Corpus.open(write_corpus(tmp_path / "corpus.jsonl"))
    index = faiss.IndexFlatIP(64)
    index.add(passages(corpus))
    path = tmp_path / "e5_Flat.index"
    config = RetrieverConfig(
        "e5",
        str(corpus.path),
        str(path),
        encoder=EncoderConfig("hash"),
        torch=TorchConfig(engine),
    )
    faiss.write_index(index, str(path))
    build_retriever(config)
    lines = corpus.path.read_text().split("\n")[:-1]
    assert json.loads(lines[0])["id"] == "d0"
    corpus.path.write_text("\n".join(reversed(lines)) + "\n")
    with pytest.raises(IndexMismatch, match=r"vector of document 'd7' \(row 0, from 0\) in row 7"):
        build_retriever(config)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [0]),
        (2, [0, 1]),
        (8, [*range(8)]),
        (9, [0, 1, 2, 3, 4, 5, 6, 8]),
        (22, [*range(0, 22, 3)]),
    ],
)
def test_sampled_rows_are_spread(count: int, expected: list[int]) -> None:
    """The same rows at every start, with both ends."""
    assert sample_rows(count) == expected
