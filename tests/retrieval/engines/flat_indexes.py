"""Helpers: random vectors, Flat indexes written by FAISS, and exact search with numpy."""

from pathlib import Path

import faiss
import numpy as np

from search_r1.retrieval.engines.flat_file import FlatFile
from search_r1.retrieval.engines.torch_flat import TorchFlatIndex
from search_r1.retrieval.settings import TorchConfig


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return the rows scaled to unit length, like the output of encoders."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_rows(seed: int, rows: int, dim: int, copies: int = 0) -> np.ndarray:
    """Return random unit rows, of which the last `copies` are exact copies of earlier rows."""
    rng = np.random.default_rng(seed)
    vectors = unit(rng.standard_normal((rows, dim)))
    if copies:
        vectors[-copies:] = vectors[rng.integers(0, rows - copies, copies)]
    return vectors


def write(path: Path, vectors: np.ndarray, kind: type[faiss.Index] = faiss.IndexFlatIP) -> FlatFile:
    """Write a Flat index of `vectors` with FAISS and open it."""
    index = kind(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return FlatFile.open(path)


def layout(
    dtype: str = "float32", devices: tuple[str, ...] = ("cpu",), tile_rows: int = 65536, rescore=0
) -> TorchConfig:
    """Return the settings of the torch backend."""
    return TorchConfig("torch", dtype, devices, tile_rows, rescore)


def load(flat: FlatFile, config: TorchConfig) -> TorchFlatIndex:
    """Return an index whose rows are loaded."""
    index = TorchFlatIndex(flat, config)
    index.read_rows()
    return index


def brute_force(queries: np.ndarray, vectors: np.ndarray, k: int, is_l2: bool = False) -> tuple:
    """Return the k best scores (summed in float64, rounded to float32) and rows, ties by row."""
    products = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if is_l2:
        difference = queries[:, None].astype(np.float64) - vectors[None].astype(np.float64)
        products = -(difference**2).sum(axis=2)
    scores = products.astype(np.float32)
    rows = [np.lexsort((np.arange(len(vectors)), -row))[:k] for row in scores]
    return np.stack([s[r] for s, r in zip(scores, rows, strict=True)]), np.stack(rows)
