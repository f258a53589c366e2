"""The messages of FAISS in ours."""

from pathlib import Path

import faiss
import pytest

from search_r1.retrieval.engines.faiss_checks import reason_of


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
