"""Exact dense search by torch over a FAISS Flat index, on CPU or GPUs, without FAISS.

The index is read by memory map into a float32, float16, bfloat16 or int8 matrix; what a smaller
dtype costs is measured while it loads.
"""

import logging
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.dense import open_dense
from search_r1.search.backends.flat_file import FlatFile, Vectors
from search_r1.search.backends.matrix import MARGIN, Layout, Matrix, choose_devices, rank, recall
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.backends.top_k import Best, best_columns, merge
from search_r1.search.corpus import Corpus
from search_r1.search.encoders.interface import Encoder

logger = logging.getLogger(__name__)

NUM_PROBES = 64
PROBE_WORDS = 12
PROBE_TOPK = 3


class TorchFlatIndex:
    """The rows of a Flat index in a matrix of any dtype."""

    def __init__(self, flat: FlatFile, layout: Layout) -> None:
        """Room for the rows comes with `load`."""
        self._flat, self._layout = flat, layout
        self.num_rows, self.dim = flat.num_rows, flat.dim

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Read the matrix; a dtype below float32 is compared with float32 on the way."""
        self._matrix = Matrix(self._flat, self._layout)
        if self._layout.dtype == "float32":
            self._matrix.load()
            return
        found = load_and_compare(self._matrix, self._flat, probe_queries(corpus, encoder))
        logger.info(
            "recall@%d of %s (rescore %d) against float32 on %d probe queries: %.4f",
            *(PROBE_TOPK, self._layout.dtype, self._layout.rescore, NUM_PROBES, found),
        )

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and rows of at most `k` vectors per query, best first, ties by row."""
        return self._matrix.search(queries, k)

    def info(self) -> dict[str, Any]:
        """Backend, shape, metric, and what is stored."""
        facts = {"engine": "torch-flat", "dim": self.dim, "metric": self._flat.metric}
        return {**facts, "dtype": self._layout.dtype, "rescore": self._layout.rescore}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The Flat index and the encoder that the settings name."""

    def open_index(file: Path) -> TorchFlatIndex:
        torch_ = config.torch
        devices = choose_devices(torch_.matrix_devices)
        layout = Layout(torch_.matrix_dtype, devices, torch_.tile_rows, torch_.rescore)
        return TorchFlatIndex(FlatFile.open(file), layout)

    return open_dense(config, open_index)


def probe_queries(corpus: Corpus, encoder: Encoder) -> Vectors:
    """Embeddings (at most NUM_PROBES, dim) of title and first words of documents drawn once."""
    rows = random.Random(0).sample(range(len(corpus)), min(NUM_PROBES, len(corpus)))
    documents = corpus.documents(sorted(rows))
    return encoder.encode_queries(
        [" ".join([d.title, *d.text.split()[:PROBE_WORDS]]) for d in documents]
    )


@torch.inference_mode()
def load_and_compare(matrix: Matrix, flat: FlatFile, queries: Vectors) -> float:
    """Load the matrix and return its recall@3 against float32, which is scored on the way."""
    probes = torch.from_numpy(queries)
    best: Best | None = None

    def watch(first_row: int, tile: Tensor) -> None:
        nonlocal best
        scores = probes.to(tile.device) @ tile.T
        if flat.metric == "l2":
            scores = 2 * scores - tile.square().sum(dim=1)
        values, columns = best_columns(scores, PROBE_TOPK + MARGIN)
        found = values.cpu(), columns.cpu() + first_row
        best = found if best is None else merge(best, found, PROBE_TOPK + MARGIN)

    matrix.load(watch)
    assert best is not None, "an index has at least one row"
    topk = min(PROBE_TOPK, flat.num_rows)
    exact = rank(probes, best[1], topk, matrix.file_rows, flat.metric)
    return recall(matrix.search(queries, PROBE_TOPK)[1], exact[1].tolist())
