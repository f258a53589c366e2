"""FAISS factories: errors before any work, and indexes compared with exact search."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from search_r1.retrieval.corpus import Fingerprint
from search_r1.retrieval.engines.faiss_index import check_gpu
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index.dense_builder import (
    build_faiss,
    bytes_per_vector,
    check_factory,
    check_room,
    kept_name,
    num_centroids,
    training_sample,
)
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.manifest import Manifest


def unit_vectors(count: int, dim: int = 16) -> np.ndarray:
    values = np.random.default_rng(1).normal(size=(count, dim)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def test_flat_is_what_faiss_writes(tmp_path: Path) -> None:
    """The streamed file equals that of FAISS, byte for byte."""
    matrix = unit_vectors(100)
    build_faiss(matrix, "Flat", tmp_path / "ours", tmp_path / "kept")
    index = faiss.IndexFlatIP(16)
    index.add(matrix)
    faiss.write_index(index, str(tmp_path / "theirs"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(
    "factory", ["HNSW32", "IVF4,Flat", "SQ8", "PCA8,Flat", "IVF4,PQ8x4", "OPQ8_16,PQ8x4"]
)
def test_factories_find_the_nearest(tmp_path: Path, factory: str) -> None:
    """Each kind of index is trained, has all rows, and finds many of the true neighbours."""
    matrix = unit_vectors(700)
    check_factory(factory, 16, len(matrix))
    build_faiss(matrix.astype(np.float16), factory, tmp_path / "x", tmp_path / "kept")
    index = faiss.read_index(str(tmp_path / "x"))
    assert (index.ntotal, index.metric_type) == (700, faiss.METRIC_INNER_PRODUCT)
    _, rows = index.search(matrix[:100], 10)
    exact = np.argsort(-(matrix[:100] @ matrix.T), axis=1)[:, :10]
    overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows, exact, strict=True)])
    assert overlap > 0.2, "a random index would have 0.014"


class Interrupted(np.ndarray):
    """A matrix whose reader is killed at row `limit`; `first` is the first row read."""

    limit, first = 0, -1

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            self.first = key.start if self.first < 0 else self.first
            if key.start >= self.limit:
                raise KeyboardInterrupt
        return super().__getitem__(key)


def test_a_killed_build_goes_on_with_what_it_had_added(tmp_path: Path) -> None:
    """It is not trained again, adds the blocks that were missing, and writes the same bytes."""
    matrix = unit_vectors(65536 + 200, 8)
    whole, resumed, kept = (tmp_path / name for name in ("whole", "resumed", "kept"))
    broken = matrix.view(Interrupted)
    broken.limit = 65536
    with pytest.raises(KeyboardInterrupt):
        build_faiss(broken, "SQ8", resumed, kept, keep_seconds=0)
    assert not resumed.exists()
    rest = matrix.view(Interrupted)
    rest.limit = len(matrix)
    build_faiss(rest, "SQ8", resumed, kept)
    assert rest.first == 65536
    build_faiss(matrix, "SQ8", whole, tmp_path / "other")
    assert resumed.read_bytes() == whole.read_bytes()


def test_a_write_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its part would take as much of the disk as the index."""
    (tmp_path / ".kept.1.part").touch()
    build_faiss(unit_vectors(100), "SQ8", tmp_path / "x", tmp_path / "kept")
    assert {path.name for path in tmp_path.iterdir()} == {"x", "kept"}


def test_the_disk_needs_room_for_what_is_not_kept_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice the index at first; a resumed build has the part that was kept."""
    config = BuildConfig("own", "corpus.jsonl", str(tmp_path), "hash:16", faiss_type="SQ8")
    manifest = Manifest("faiss", Fingerprint(1_000_000, 1, "x"), 1_000_000, dim=16)
    caplog.set_level("INFO")
    for kept_bytes, need in ((0, "32 MB"), (4_000_000, "28 MB"), (20_000_000, "16 MB")):
        (tmp_path / kept_name(config)).write_bytes(b"0" * kept_bytes)
        check_room(config, tmp_path, manifest, embedded_bytes=0)
        assert f"disk: {need} needed" in caplog.messages[-1]


@pytest.mark.parametrize("factory", ["HNSW32", "IVF4,PQ8x4"])
def test_rows_are_added_to_what_was_kept(tmp_path: Path, factory: str) -> None:
    """Also to a graph; the rows of the second part are found as well as those of the first."""
    matrix = unit_vectors(700)
    index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(matrix)
    index.add(matrix[:350])
    faiss.write_index(index, str(tmp_path / "kept"))
    build_faiss(matrix, factory, tmp_path / "x", tmp_path / "kept")
    index.add(matrix[350:])
    built = faiss.read_index(str(tmp_path / "x"))
    assert built.ntotal == 700
    found, expected = (i.search(matrix, 1)[1][:, 0] == np.arange(700) for i in (built, index))
    assert (found == expected).mean() > 0.95


WRONG = ["Nonsense", "PQ7", "IVF,Flat", "", "IDMap,Flat", "IDMap,IVF4,Flat", "PCA80,Flat", "NSG8"]


@pytest.mark.parametrize("factory", [*WRONG, "HNSW0", "IVF0,Flat"])
def test_unusable_factories_are_refused(factory: str) -> None:
    """A factory that FAISS cannot create or fill for these dimensions is refused beforehand."""
    with pytest.raises(SetupError, match="--faiss_type"):
        check_factory(factory, 16, 10**9)


@pytest.mark.parametrize(
    ("factory", "centroids"),
    [
        ("Flat", 0),
        ("HNSW64", 0),
        ("SQ8", 0),
        ("IVF4096,Flat", 4096),
        ("IVF16,PQ64", 256),
        ("OPQ8_16,IVF16,PQ8x4", 16),
        ("PQ8x10", 1024),
        ("IVF65536_HNSW32,Flat", 65536),
    ],
)
def test_centroids_that_are_trained(factory: str, centroids: int) -> None:
    """The number of centroids is that of the largest codebook."""
    assert num_centroids(factory) == centroids


@pytest.mark.parametrize("factory", ["IVF64,Flat", "IVF64,SQ8", "OPQ8_16,IVF64,Flat"])
def test_the_error_for_a_small_corpus_has_a_usable_number_of_lists(factory: str) -> None:
    """The number of lists in the error message is accepted for the same corpus."""
    with pytest.raises(SetupError, match="at most 25 lists in IVF"):
        check_factory(factory, 16, 1000)
    check_factory(factory.replace("IVF64", "IVF25"), 16, 1000)


def test_training_sample_is_seeded_and_bounded() -> None:
    """The sample has at most 256 vectors per centroid, in row order, and is reproducible."""
    matrix = np.arange(3000, dtype=np.float32)[:, None]
    sample = training_sample(matrix, "IVF4,Flat")
    assert sample.shape == (1024, 1) and (np.diff(sample[:, 0]) > 0).all()
    np.testing.assert_array_equal(sample, training_sample(matrix, "IVF4,Flat"))
    assert len(training_sample(matrix, "IVF64,Flat")) == 3000


@pytest.mark.parametrize(
    "factory", ["Flat", "HNSW32", "IVF4,Flat", "SQ8", "IVF4,PQ8x4", "HNSW16_SQ8"]
)
def test_estimated_size_is_near_the_true_one(tmp_path: Path, factory: str) -> None:
    """The estimate for the disk check is within 25 % of the written size, except for the header."""
    matrix = unit_vectors(4000)
    build_faiss(matrix, factory, tmp_path / "x", tmp_path / "kept")
    written = (tmp_path / "x").stat().st_size
    assert bytes_per_vector(factory, 16) * 4000 == pytest.approx(written, rel=0.25, abs=4000)


def test_training_on_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag does not silently fall back to the CPU."""
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    with pytest.raises(SetupError):
        check_gpu("train")
