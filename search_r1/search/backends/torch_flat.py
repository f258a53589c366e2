"""Exact dense search by torch over a FAISS Flat index, on CPU or GPUs, without FAISS.

The index is read by memory map into a float32, float16, bfloat16 or int8 matrix; what a smaller
dtype costs is measured while it loads.
"""

import logging
import random
from typing import Any

import torch
from torch import Tensor

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.dense import DenseRetriever
from search_r1.search.backends.flat_file import FlatFile, Vectors
from search_r1.search.backends.locations import open_corpus
from search_r1.search.backends.matrix import MARGIN, Layout, Matrix, choose_devices, rank, recall
from search_r1.search.backends.settings import RetrieverConfig, TorchConfig
from search_r1.search.backends.top_k import Best, best_columns, merge
from search_r1.search.backends.vector_index import (
    check_manifest,
    check_shape,
    index_digest,
    locate_index,
    read_ahead,
    vectors_file,
)
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import open_encoder
from search_r1.search.encoders.interface import Encoder

logger = logging.getLogger(__name__)

NUM_PROBES = 64
PROBE_WORDS = 12
PROBE_TOPK = 3


class TorchFlatIndex:
    """The rows of a Flat index in a matrix of any dtype."""

    def __init__(self, flat: FlatFile, layout: Layout, corpus: Corpus, encoder: Encoder) -> None:
        """Load the matrix; a dtype below float32 is compared with float32 on the way."""
        self._flat, self._layout = flat, layout
        self._matrix = Matrix(flat, layout)
        self.recall = 1.0
        """Share of the exact top 3 that is found, over the probe queries."""
        if layout.dtype == "float32":
            self._matrix.load()
        else:
            self.recall = load_and_compare(self._matrix, flat, probe_queries(corpus, encoder))
            logger.info(
                "recall@%d of %s (rescore %d) against float32 on %d probe queries: %.4f",
                *(PROBE_TOPK, layout.dtype, layout.rescore, NUM_PROBES, self.recall),
            )

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and rows of at most `k` vectors per query, best first, ties by row."""
        return self._matrix.search(queries, k)

    def info(self) -> dict[str, Any]:
        """Engine, shape, metric, and what is stored."""
        facts = {"engine": "torch-flat", "dim": self._flat.dim, "metric": self._flat.metric}
        return {**facts, "dtype": self._layout.dtype, "rescore": self._layout.rescore}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The Flat index and the encoder that the settings name."""
    corpus = open_corpus(config)
    path = locate_index(config)
    file = vectors_file(path)
    read_ahead(file)
    flat = FlatFile.open(file)
    encoder = open_encoder(config.encoder)
    check_manifest(path, corpus, encoder)
    check_shape(path, flat.num_rows, flat.dim, corpus, encoder)
    index = TorchFlatIndex(flat, _layout(config.torch), corpus, encoder)
    return DenseRetriever(config.retriever_name, index, index_digest(file), corpus, encoder)


def _layout(config: TorchConfig) -> Layout:
    devices = choose_devices(config.matrix_devices)
    return Layout(config.matrix_dtype, devices, config.tile_rows, config.rescore)


def probe_queries(corpus: Corpus, encoder: Encoder) -> Vectors:
    """Embeddings (at most NUM_PROBES, dim) of title and first words of documents drawn once."""
    rows = random.Random(0).sample(range(len(corpus)), min(NUM_PROBES, len(corpus)))
    texts = [
        " ".join([document.title, *document.text.split()[:PROBE_WORDS]])
        for document in corpus.documents(sorted(rows))
    ]
    return encoder.encode_queries(texts)


@torch.inference_mode()
def load_and_compare(matrix: Matrix, flat: FlatFile, queries: Vectors) -> float:
    """Load the matrix and return its recall@3 against float32, which is scored on the way."""
    probes = torch.from_numpy(queries)
    num_candidates = PROBE_TOPK + MARGIN
    best: Best | None = None

    def watch(first_row: int, tile: Tensor) -> None:
        nonlocal best
        scores = probes.to(tile.device) @ tile.T
        if flat.metric == "l2":
            scores = 2 * scores - tile.square().sum(dim=1)
        values, columns = best_columns(scores, num_candidates)
        found = values.cpu(), columns.cpu() + first_row
        best = found if best is None else merge(best, found, num_candidates)

    matrix.load(watch)
    assert best is not None, "an index has at least one row"

    def read(rows: Tensor) -> Tensor:
        return torch.from_numpy(flat.rows(rows.numpy()))

    exact = rank(probes, best[1], min(PROBE_TOPK, flat.num_rows), read, flat.metric)
    return recall(matrix.search(queries, PROBE_TOPK)[1], exact[1].tolist())
