"""A matrix of row vectors in shards on several devices, and its rows with the highest scores.

Scores of all rows, tile by tile, only choose candidates: rounding depends on tile and batch. The
candidates' scores are then summed in float64, so an answer is the same for any tiling, sharding
and batch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from search_r1.search.backends.flat_file import FlatFile, Vectors, check_finite
from search_r1.search.backends.shard import DTYPES, Shard
from search_r1.search.backends.top_k import Best, by_score_then_row, merge
from search_r1.search.errors import SetupError
from search_r1.search.memory import QUERY_BLOCK

MARGIN = 32
"""Candidates beyond k whose scores are summed again."""
SUM_VALUES = 1 << 21
"""Values that are summed in float64 at a time (16 MB)."""


@dataclass(frozen=True)
class Layout:
    """How a matrix is stored and read."""

    dtype: str = "float32"
    devices: tuple[str, ...] = ("cpu",)
    """One shard each; a device may be named several times."""
    tile_rows: int = 65536
    rescore: int = 0
    """Candidates per query that are scored by the float32 file; 0: by the stored rows."""


class Matrix:
    """All rows of a Flat index in shards."""

    def __init__(self, flat: FlatFile, layout: Layout) -> None:
        """Room for the rows of `flat`; raises SetupError for an unknown device or dtype."""
        if layout.dtype not in DTYPES:
            raise SetupError(f"--matrix_dtype {layout.dtype}; expected {', '.join(DTYPES)}")
        self._flat = flat
        self._layout = layout
        devices = layout.devices[: flat.num_rows]
        bounds = [i * flat.num_rows // len(devices) for i in range(len(devices) + 1)]
        self.shards = []
        for device, start, end in zip(devices, bounds, bounds[1:], strict=False):
            try:
                self.shards.append(Shard(device, start, end - start, flat, layout.dtype))
            except (RuntimeError, AssertionError) as error:  # torch's: no CUDA, or no memory
                raise SetupError(
                    f"--matrix_devices {device} cannot hold {end - start} rows of {layout.dtype} "
                    f"({error}); expected a device of this machine with room for its shard: cpu, "
                    "cuda:0 ..."
                ) from error
        self._threads = ThreadPoolExecutor(len(devices)) if len(devices) > 1 else None

    def load(self, watch: Callable[[int, Tensor], None] | None = None) -> None:
        """Read the file by tiles; `watch` sees each first row and float32 tile on its device."""
        for shard in self.shards:
            row, last = shard.first_row, shard.first_row + len(shard)
            for rows in self._flat.tiles(self._layout.tile_rows, row, last):
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
        """Scores and rows of the k best per query, best first, ties by row.

        A score is the inner product, or the negative squared distance of an L2 index.
        """
        k = min(k, self._flat.num_rows)
        rows = torch.from_numpy(np.ascontiguousarray(queries))
        starts = range(0, len(rows), QUERY_BLOCK)
        best = [self._search_block(rows[i : i + QUERY_BLOCK], k) for i in starts]
        return (
            [of_query for scores, _ in best for of_query in scores.tolist()],
            [of_query for _, found in best for of_query in found.tolist()],
        )

    @torch.inference_mode()
    def _search_block(self, queries: Tensor, k: int) -> Best:
        rescore = self._layout.rescore
        num_candidates = min(max(k, rescore) if rescore else k + MARGIN, self._flat.num_rows)

        def best(shard: Shard) -> Best:
            with torch.inference_mode():
                return shard.best(queries, num_candidates, self._layout.tile_rows)

        found = self._threads.map(best, self.shards) if self._threads else map(best, self.shards)
        candidates = reduce(lambda a, b: merge(a, b, num_candidates), found)[1]
        read = self.file_rows if rescore else self._stored_rows
        return rank(queries, candidates, k, read, self._flat.metric)

    def file_rows(self, rows: Tensor) -> Tensor:
        """float32 rows (n, dim) of the file, by their numbers (n,)."""
        return torch.from_numpy(self._flat.rows(rows.numpy()))

    def _stored_rows(self, rows: Tensor) -> Tensor:
        """Stored rows (n, dim) of any shards, in the order of `rows` (n,)."""
        vectors = torch.empty((len(rows), self._flat.dim))
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
