"""The repeated corpus and its vectors, and the questions."""

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from benchmarks.retrieval.__main__ import _bench, _parser
from benchmarks.retrieval.corpora import check_repetition, questions, repeat_corpus, repeat_vectors
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import SetupError


def write(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"x{i}", "contents": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_repeated_rows_are_in_order_with_distinct_ids(tmp_path: Path) -> None:
    """Row i has the text of row i modulo the source's length, and the id i."""
    real = write(tmp_path / "real.jsonl", ["a\nb", "ü", "c"])
    repeat_corpus(real, tmp_path / "large.jsonl", 8)
    documents = list(Corpus.open(tmp_path / "large.jsonl"))
    assert [d.id for d in documents] == [str(i) for i in range(8)]
    assert [d.contents for d in documents] == [["a\nb", "ü", "c"][i % 3] for i in range(8)]
    check_repetition(real, tmp_path / "large.jsonl")


def test_a_corpus_that_is_no_repetition_is_refused(tmp_path: Path) -> None:
    """The repeated vectors would belong to other texts."""
    real = write(tmp_path / "real.jsonl", ["a", "b"])
    with pytest.raises(SetupError, match="row 3"):
        check_repetition(real, write(tmp_path / "large.jsonl", ["a", "b", "b"]))


def test_repeated_vectors_are_in_order(tmp_path: Path) -> None:
    """The index of the repeated corpus has the real vectors again and again."""
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    index = faiss.IndexFlatIP(4)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "small.faiss"))
    repeat_vectors(tmp_path / "small.faiss", tmp_path / "large.faiss", 8)
    large = faiss.read_index(str(tmp_path / "large.faiss"))
    assert large.metric_type == faiss.METRIC_INNER_PRODUCT
    assert np.array_equal(large.reconstruct_n(0, 8), vectors[np.arange(8) % 3])


def test_questions_are_distinct(tmp_path: Path) -> None:
    """A question in both splits is returned once."""
    for name, split in (("train.jsonl", ["q1", "q2"]), ("dev.jsonl", ["q2", "q3"])):
        rows = "".join(json.dumps({"question": q}) + "\n" for q in split)
        (tmp_path / name).write_text(rows)
    assert questions(tmp_path) == ["q1", "q2", "q3"]


def test_the_error_for_missing_questions_names_the_command_that_creates_them(
    tmp_path: Path,
) -> None:
    """A new checkout has no questions; the error is raised before anything is encoded."""
    args = _parser().parse_args(["--data", str(tmp_path), "--cache", str(tmp_path / "cache")])
    with pytest.raises(SetupError, match=r"train\.jsonl.*data_process/small_hotpotqa\.py"):
        _bench(args)
    assert not (tmp_path / "cache").exists()
