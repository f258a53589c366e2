"""Reading Flat index files that FAISS itself wrote."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.retrieval.engines.flat_file import FlatFile
from search_r1.retrieval.errors import SetupError

RNG = np.random.default_rng(3)


def write(path: Path, index: faiss.Index, rows: int = 7) -> Path:
    """Add `rows` random vectors to the index and write it with FAISS."""
    vectors = RNG.standard_normal((max(rows, 64), index.d)).astype(np.float32)
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors[:rows])
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize(
    ("kind", "metric"), [(faiss.IndexFlatIP, "inner_product"), (faiss.IndexFlatL2, "l2")]
)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_reads_what_faiss_wrote(
    tmp_path: Path, kind: type[faiss.Index], metric: str, rows: int
) -> None:
    """Shape, metric and every value are as FAISS wrote them."""
    index = kind(5)
    flat = FlatFile.open(write(tmp_path / "flat", index, rows))
    assert (flat.num_rows, flat.dim, flat.metric) == (rows, 5, metric)
    np.testing.assert_array_equal(flat.vectors, index.reconstruct_n(0, rows))


def test_generic_flat_index_is_read_by_its_metric(tmp_path: Path) -> None:
    """An index of class faiss.IndexFlat is accepted if its metric is supported."""
    path = write(tmp_path / "flat", faiss.IndexFlat(4, faiss.METRIC_INNER_PRODUCT))
    assert FlatFile.open(path).metric == "inner_product"
    with pytest.raises(SetupError, match="metric 2; expected inner product"):
        FlatFile.open(write(tmp_path / "l1", faiss.IndexFlat(4, faiss.METRIC_L1)))


@pytest.mark.parametrize("tile_rows", [1, 3, 7, 100])
def test_tiles_are_the_rows_in_order(tmp_path: Path, tile_rows: int) -> None:
    """Tiles of any size, joined, are the requested rows; they are aligned in memory."""
    flat = FlatFile.open(write(tmp_path / "flat", faiss.IndexFlatIP(5)))
    tiles = list(flat.tiles(tile_rows, 2, 6))
    np.testing.assert_array_equal(np.concatenate(tiles), flat.vectors[2:6])
    assert all(tile.flags.aligned and len(tile) <= tile_rows for tile in tiles)
    np.testing.assert_array_equal(np.concatenate(list(flat.tiles(tile_rows))), flat.vectors)


def test_rows_keep_the_shape_of_what_was_asked(tmp_path: Path) -> None:
    """Row numbers of shape (queries, k) give vectors of shape (queries, k, dim)."""
    flat = FlatFile.open(write(tmp_path / "flat", faiss.IndexFlatIP(5)))
    rows = np.array([[6, 0], [3, 3]])
    assert flat.rows(rows).shape == (2, 2, 5)
    np.testing.assert_array_equal(flat.rows(rows)[0, 1], flat.vectors[0])


@pytest.mark.parametrize("factory", ["HNSW4", "IVF1,Flat", "PQ2x4", "SQ8", "PCA2,Flat"])
def test_other_indexes_are_refused(tmp_path: Path, factory: str) -> None:
    """Another kind of index is refused; the error names the engine that reads most kinds."""
    path = write(tmp_path / "other", faiss.index_factory(4, factory), 64)
    with pytest.raises(SetupError, match="--dense_engine faiss"):
        FlatFile.open(path)
