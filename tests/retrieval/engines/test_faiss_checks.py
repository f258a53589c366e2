"""A FAISS file that ends the process which reads it is one line, before the server reads it."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.retrieval.engines.faiss_checks import reason_of, try_in_child
from search_r1.retrieval.errors import IndexMismatch, SetupError

DYING = "tests.retrieval.engines.dying_trial"
VECTORS = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL", "other"])
def test_a_child_that_ends_is_one_line(name: str, tmp_path: Path) -> None:
    """Whatever ended it: a signal, or an error that nobody expected."""
    (tmp_path / name).write_bytes(b"IHNf")
    with pytest.raises(SetupError, match=name if name != "other" else "last line") as caught:
        try_in_child(tmp_path / name, whole=False, program=DYING)
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)


def written(path: Path, index: faiss.Index) -> Path:
    faiss.write_index(index, str(path))
    return path


def test_a_child_reads_checks_and_searches(tmp_path: Path) -> None:
    """A sound index passes; an infinite vector has the error and class that the server gives."""
    index = faiss.index_factory(8, "HNSW4,SQfp16", faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    try_in_child(written(tmp_path / "sound", index), whole=False)
    index.add(np.full((1, 8), np.inf, dtype=np.float32))
    with pytest.raises(IndexMismatch, match="row 100 "):
        try_in_child(written(tmp_path / "infinite", index), whole=False)


def test_a_kind_that_cannot_be_searched_alone_is_refused(tmp_path: Path) -> None:
    """Codes of two quantizers without lists: FAISS reads them and has no search for them."""
    index = faiss.index_factory(8, "Residual2x2,PQ4x4", faiss.METRIC_L2)
    index.train(VECTORS)
    index.add(VECTORS)
    with pytest.raises(SetupError, match=r"cannot be searched by FAISS \(not implemented\)"):
        try_in_child(written(tmp_path / "two", index), whole=False)


def test_messages_of_faiss_lose_their_signatures(tmp_path: Path) -> None:
    """What remains is the reason, in one short line."""
    (tmp_path / "none").write_bytes(b"no index of FAISS")
    with pytest.raises(RuntimeError) as read:
        faiss.read_index(str(tmp_path / "none"))
    with pytest.raises(RuntimeError) as made:
        faiss.index_factory(8, "IMI2x2,Flat", faiss.METRIC_INNER_PRODUCT)
    assert "index_factory.cpp" in str(made.value)
    for error in (read.value, made.value, RuntimeError("a\nb " * 300), MemoryError()):
        reason = reason_of(error)
        assert reason and len(reason) <= 200
        assert not [part for part in ("\n", "std::", ".cpp") if part in reason]
