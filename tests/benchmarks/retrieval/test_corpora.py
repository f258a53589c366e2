"""The corpus by repetition and its vectors."""

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from benchmarks.retrieval.__main__ import _bench, _parser
from benchmarks.retrieval.corpora import check_repetition, questions, repeat_corpus, repeat_vectors
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SetupError


def write(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"x{i}", "contents": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_repeat_in_turn_with_ids_of_their_own(tmp_path: Path) -> None:
    """Row i has the text of row i modulo the source's length, and the id i."""
    real = write(tmp_path / "real.jsonl", ["a\nb", "ü", "c"])
    repeat_corpus(real, tmp_path / "large.jsonl", 8)
    documents = list(Corpus.open(tmp_path / "large.jsonl"))
    assert [d.id for d in documents] == [str(i) for i in range(8)]
    assert [d.contents for d in documents] == [["a\nb", "ü", "c"][i % 3] for i in range(8)]
    check_repetition(real, tmp_path / "large.jsonl")


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    """Repeated vectors would belong to other texts."""
    real = write(tmp_path / "real.jsonl", ["a", "b"])
    with pytest.raises(SetupError, match="row 3"):
        check_repetition(real, write(tmp_path / "large.jsonl", ["a", "b", "b"]))


def test_vectors_repeat_in_turn(tmp_path: Path) -> None:
    """The index of the repeated corpus holds the real vectors over and over."""
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    index = faiss.IndexFlatIP(4)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "small.faiss"))
    repeat_vectors(tmp_path / "small.faiss", tmp_path / "large.faiss", 8)
    large = faiss.read_index(str(tmp_path / "large.faiss"))
    assert large.metric_type == faiss.METRIC_INNER_PRODUCT
    assert np.array_equal(large.reconstruct_n(0, 8), vectors[np.arange(8) % 3])


def test_questions_are_distinct(tmp_path: Path) -> None:
    """A question in both splits is asked once."""
    for name, asked in (("train.jsonl", ["q1", "q2"]), ("dev.jsonl", ["q2", "q3"])):
        rows = "".join(json.dumps({"question": q}) + "\n" for q in asked)
        (tmp_path / name).write_text(rows)
    assert questions(tmp_path) == ["q1", "q2", "q3"]


def test_missing_questions_name_the_command_that_makes_them(tmp_path: Path) -> None:
    """A new checkout has none; it is told at once, before anything is encoded."""
    args = _parser().parse_args(["--data", str(tmp_path), "--cache", str(tmp_path / "cache")])
    with pytest.raises(SetupError, match=r"train\.jsonl.*data_process/small_hotpotqa\.py"):
        _bench(args)
    assert not (tmp_path / "cache").exists()
