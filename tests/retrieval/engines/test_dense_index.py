"""Location, digest and read-ahead of dense index files."""

from pathlib import Path

import pytest

from search_r1.retrieval.engines.dense import (
    index_digest,
    locate_index,
    read_ahead,
    vectors_file,
)
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import RetrieverConfig


def located(folder: Path) -> Path:
    """Locate the `e5` index in a folder."""
    return locate_index(RetrieverConfig("e5", "corpus.jsonl", str(folder)))


def test_flat_then_the_only_index_of_the_name(tmp_path: Path) -> None:
    """Indexes of other names are ignored, Flat comes first, and several others are an error."""
    (tmp_path / "bge_Flat.index").mkdir()
    (tmp_path / "e5_HNSW32.index").mkdir()
    assert located(tmp_path) == tmp_path / "e5_HNSW32.index"
    assert located(tmp_path / "bge_Flat.index") == tmp_path / "bge_Flat.index"
    (tmp_path / "e5_PQ64.index").mkdir()
    with pytest.raises(SetupError, match=r"holds e5_HNSW32\.index, e5_PQ64\.index; expected one"):
        located(tmp_path)
    (tmp_path / "e5_Flat.index").write_bytes(b"IxFI")
    assert located(tmp_path) == vectors_file(located(tmp_path)) == tmp_path / "e5_Flat.index"
    assert vectors_file(tmp_path / "e5_PQ64.index").name == "vectors.faiss"
    with pytest.raises(SetupError):
        located(tmp_path / "none")


@pytest.mark.parametrize("size", [1, 4096, 3_000_000])
def test_digest_sees_size_start_middle_and_end(tmp_path: Path, size: int) -> None:
    """Files that differ in length, in the first byte or in the last byte have other digests."""
    path = tmp_path / "index"
    contents = [bytes(size), bytes(size + 1), bytes(size - 1) + b"x", b"y" + bytes(size - 1)]
    digests = []
    for content in contents:
        path.write_bytes(content)
        digests.append(index_digest(path))
    assert len(set(digests)) == len(contents)
    path.write_bytes(contents[0])
    assert index_digest(path) == digests[0]


def test_reading_ahead_reads_all_and_fails_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread ends after a file of several chunks, and after a missing file, which is logged."""
    monkeypatch.setattr("search_r1.retrieval.engines.dense.READ_CHUNK_BYTES", 1000)
    file = tmp_path / "vectors.faiss"
    file.write_bytes(b"x" * 2500)
    with caplog.at_level("INFO"):
        for path in (file, tmp_path / "missing"):
            thread = read_ahead(path)
            thread.join(10)
            assert not thread.is_alive()
    assert "missing" in caplog.text
