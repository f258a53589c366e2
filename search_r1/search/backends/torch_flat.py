"""Exact dense search by torch over a FAISS Flat index, on CPU or GPUs, without FAISS.

The index is read by memory map into shards of float32, float16, bfloat16 or int8; what a smaller
dtype costs is measured while it loads. Scores of all rows, tile by tile, only choose candidates:
rounding depends on tile and batch. The candidates' scores are then summed in float64, so an answer
is the same for any tiling, sharding and batch.
"""

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.dense import open_dense
from search_r1.search.backends.flat_file import FlatFile, Vectors, check_finite
from search_r1.search.backends.shard import (
    DTYPES,
    Best,
    Shard,
    best_columns,
    by_score_then_row,
    merge,
)
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder
from search_r1.search.errors import SetupError
from search_r1.search.memory import QUERY_BLOCK
from search_r1.search.settings import RetrieverConfig, TorchConfig

logger = logging.getLogger(__name__)

MARGIN = 32
"""Candidates beyond k whose scores are summed again."""
SUM_VALUES = 1 << 21
"""Values that are summed in float64 at a time (16 MB)."""
NUM_PROBES = 64
PROBE_WORDS = 12
PROBE_TOPK = 3


class Matrix:
    """All rows of a Flat index in shards, one on each device."""

    def __init__(self, flat: FlatFile, config: TorchConfig) -> None:
        """Room for the rows comes with `fill`; raises SetupError for an unknown dtype."""
        if config.matrix_dtype not in DTYPES:
            raise SetupError(f"--matrix_dtype {config.matrix_dtype}; expected {', '.join(DTYPES)}")
        self._flat, self._config = flat, config
        self.num_rows, self.dim = flat.num_rows, flat.dim
        self.shards: list[Shard] = []

    def _make_room(self) -> None:
        """A shard on each device; raises SetupError for an unknown or full one."""
        flat, dtype = self._flat, self._config.matrix_dtype
        devices = choose_devices(self._config.matrix_devices)[: flat.num_rows]
        bounds = [i * flat.num_rows // len(devices) for i in range(len(devices) + 1)]
        for device, start, end in zip(devices, bounds, bounds[1:], strict=False):
            try:
                self.shards.append(Shard(device, start, end - start, flat, dtype))
            except (RuntimeError, AssertionError) as error:  # torch's: no CUDA, or no memory
                raise SetupError(
                    f"--matrix_devices {device} cannot hold {end - start} rows of {dtype} "
                    f"({error}); expected a device with room for its shard: cpu, cuda:0 ..."
                ) from error
        self._threads = ThreadPoolExecutor(len(devices)) if len(devices) > 1 else None

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Read the rows; a dtype below float32 is compared with float32 on the way."""
        if self._config.matrix_dtype == "float32":
            self.fill()
            return
        found = load_and_compare(self, self._flat, probe_queries(corpus, encoder))
        logger.info(
            "recall@%d of %s (rescore %d) against float32 on %d probe queries: %.4f",
            *(PROBE_TOPK, self._config.matrix_dtype, self._config.rescore, NUM_PROBES, found),
        )

    def info(self) -> dict[str, Any]:
        """Backend, shape, metric, and what is stored."""
        facts = {"engine": "torch-flat", "dim": self.dim, "metric": self._flat.metric}
        return {**facts, "dtype": self._config.matrix_dtype, "rescore": self._config.rescore}

    def fill(self, watch: Callable[[int, Tensor], None] | None = None) -> None:
        """Make room and read the file by tiles; `watch` sees each first row and float32 tile on
        its device."""
        self._make_room()
        for shard in self.shards:
            row, last = shard.first_row, shard.first_row + len(shard)
            for rows in self._flat.tiles(self._config.tile_rows, row, last):
                tile = torch.from_numpy(rows).to(shard.device)
                if not shard.fill(row - shard.first_row, tile):
                    check_finite(self._flat.path, row, rows)
                    raise SetupError(
                        f"{self._flat.path} has values beyond float16 (65504) in rows {row} and "
                        "on; use --matrix_dtype bfloat16"
                    )
                if watch is not None:
                    watch(row, tile)
                row += len(rows)

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Inner products or negative squared distances, and rows, of the k best per query."""
        k = min(k, self.num_rows)
        rows = torch.from_numpy(np.ascontiguousarray(queries))
        starts = range(0, len(rows), QUERY_BLOCK)
        best = [self._search_block(rows[i : i + QUERY_BLOCK], k) for i in starts]
        return (
            [of_query for scores, _ in best for of_query in scores.tolist()],
            [of_query for _, found in best for of_query in found.tolist()],
        )

    @torch.inference_mode()
    def _search_block(self, queries: Tensor, k: int) -> Best:
        rescore = self._config.rescore
        num_candidates = min(max(k, rescore) if rescore else k + MARGIN, self.num_rows)

        def best(shard: Shard) -> Best:
            with torch.inference_mode():
                return shard.best(queries, num_candidates, self._config.tile_rows)

        found = self._threads.map(best, self.shards) if self._threads else map(best, self.shards)
        candidates = reduce(lambda a, b: merge(a, b, num_candidates), found)[1]
        read = self.file_rows if rescore else self._stored_rows
        return rank(queries, candidates, k, read, self._flat.metric)

    def file_rows(self, rows: Tensor) -> Tensor:
        """float32 rows (n, dim) of the file, by their numbers (n,)."""
        return torch.from_numpy(self._flat.rows(rows.numpy()))

    def _stored_rows(self, rows: Tensor) -> Tensor:
        """Stored rows (n, dim) of any shards, in the order of `rows` (n,)."""
        vectors = torch.empty((len(rows), self.dim))
        for shard in self.shards:
            own = (rows >= shard.first_row) & (rows < shard.first_row + len(shard))
            vectors[own] = shard.rows(rows[own])
        return vectors


def rank(
    queries: Tensor, candidates: Tensor, k: int, read: Callable[[Tensor], Tensor], metric: str
) -> Best:
    """The k best of candidates (num_queries, n) by scores summed in float64, rounded to float32.

    `read` gives the float32 vectors (m, dim) of rows (m,).
    """
    num_candidates, dim = candidates.shape[1], queries.shape[1]
    step = max(1, SUM_VALUES // (num_candidates * dim))
    scores = torch.empty(candidates.shape)
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        vectors = read(candidates[block].flatten()).double().view(-1, num_candidates, dim)
        query = queries[block].double()[:, None]
        is_l2 = metric == "l2"
        terms = -(query - vectors).square() if is_l2 else query * vectors
        scores[block] = terms.sum(dim=2).float()
    return by_score_then_row(scores, candidates, k)


def choose_devices(names: Sequence[str]) -> tuple[str, ...]:
    """The devices that were named, else all GPUs, else the CPU."""
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return tuple(names) or gpus or ("cpu",)


def recall(found: list[list[int]], expected: list[list[int]]) -> float:
    """The share of expected rows that were found, over all queries."""
    hits = sum(len(set(a) & set(b)) for a, b in zip(found, expected, strict=True))
    return hits / sum(map(len, expected))


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The Flat index and the encoder that the settings name."""
    return open_dense(config, lambda file: Matrix(FlatFile.open(file), config.torch))


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

    matrix.fill(watch)
    assert best is not None, "an index has at least one row"
    topk = min(PROBE_TOPK, flat.num_rows)
    exact = rank(probes, best[1], topk, matrix.file_rows, flat.metric)
    return recall(matrix.search(queries, PROBE_TOPK)[1], exact[1].tolist())
