"""Exact dense search with torch over a FAISS Flat index, on CPU or GPUs.

The file is read into shards of float32, float16, bfloat16 or int8; the recall of a smaller dtype is
measured meanwhile. Scores of all rows only choose candidates, since their rounding depends on tile
and batch. The candidates' scores are summed in float64, so that a result depends on neither.
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

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.encoder import Encoder
from search_r1.retrieval.engines.base import Ranking, Retriever
from search_r1.retrieval.engines.dense import open_dense
from search_r1.retrieval.engines.filtered import drop
from search_r1.retrieval.engines.flat_file import FlatFile, Vectors, check_finite
from search_r1.retrieval.engines.shard import (
    DTYPES,
    Shard,
    TopK,
    merge_top_k,
    select_top_k,
    top_columns,
)
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import RetrieverConfig, TorchConfig
from verl.machine import HostMemory, format_bytes

logger = logging.getLogger(__name__)

QUERY_BLOCK = 256
"""Queries that are scored against a tile at once."""
MARGIN = 32
"""Candidates beyond k whose scores are computed again in float64."""
SUM_VALUES = 1 << 21
"""Maximum number of values that are summed in float64 at a time (16 MB)."""
NUM_PROBES = 64
PROBE_WORDS = 12
PROBE_TOPK = 3


class TorchFlatIndex:
    """All rows of a Flat index in shards, one on each device."""

    def __init__(self, flat: FlatFile, config: TorchConfig) -> None:
        """Allocates nothing yet; raises SetupError for an unknown dtype."""
        if config.matrix_dtype not in DTYPES:
            raise SetupError(f"--matrix_dtype {config.matrix_dtype}; expected {', '.join(DTYPES)}")
        self._flat, self._config = flat, config
        self.num_rows, self.dim = flat.num_rows, flat.dim
        self.shards: list[Shard] = []

    def _allocate(self) -> None:
        """Allocate a shard on each device; raises SetupError for an unknown or full device."""
        flat, dtype = self._flat, self._config.matrix_dtype
        devices = choose_devices(self._config.matrix_devices)[: flat.num_rows]
        bounds = [i * flat.num_rows // len(devices) for i in range(len(devices) + 1)]
        for device, start, end in zip(devices, bounds, bounds[1:], strict=False):
            size = (end - start) * flat.dim * DTYPES[dtype].itemsize
            free = HostMemory.now().free
            if device == "cpu" and size > free:  # allocating would succeed, and filling kill us
                raise SetupError(
                    f"--matrix_devices cpu: got {format_bytes(size)} of {dtype}, expected at most "
                    f"the {format_bytes(free)} that are free; fix: --matrix_dtype bfloat16 or "
                    "int8, or --dense_engine faiss, which maps the file"
                )
            try:
                self.shards.append(Shard(device, start, end - start, flat, dtype))
            except (RuntimeError, AssertionError) as error:  # torch's: no CUDA, or no memory
                raise SetupError(
                    f"--matrix_devices {device} cannot hold {end - start} rows of {dtype} "
                    f"({error}); expected a device with memory for its shard: cpu, cuda:0 ..."
                ) from error
        self._threads = ThreadPoolExecutor(len(devices)) if len(devices) > 1 else None

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Read the rows; for a dtype below float32, also measure and log its recall."""
        if self._config.matrix_dtype == "float32":
            self.read_rows()
            return
        queries = probe_queries(corpus, encoder)
        recall_of_dtype = load_and_measure_recall(self, self._flat, queries)
        logger.info(
            "recall@%d of %s (rescore %d) against float32 on %d probe queries: %.4f",
            PROBE_TOPK,
            self._config.matrix_dtype,
            self._config.rescore,
            len(queries),
            recall_of_dtype,
        )

    def info(self) -> dict[str, Any]:
        facts = {"engine": "torch-flat", "dim": self.dim, "metric": self._flat.metric}
        return {**facts, "dtype": self._config.matrix_dtype, "rescore": self._config.rescore}

    def read_rows(self, on_tile: Callable[[int, Tensor], None] | None = None) -> None:
        """Allocate the shards and read the file into them, tile by tile.

        `on_tile` is called with the first row of each tile and its float32 values on the device.
        """
        self._allocate()
        for shard in self.shards:
            row, end = shard.first_row, shard.first_row + len(shard)
            for rows in self._flat.tiles(self._config.tile_rows, row, end):
                tile = torch.from_numpy(rows).to(shard.device)
                if not shard.store(row - shard.first_row, tile):
                    check_finite(self._flat.path, row, rows)
                    raise SetupError(
                        f"{self._flat.path} has values beyond float16 (65504) in rows {row} and "
                        "on; use --matrix_dtype bfloat16"
                    )
                if on_tile is not None:
                    on_tile(row, tile)
                row += len(rows)

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Ranking:
        """Return scores (negative squared distances for L2) and rows of the k best per query."""
        k = min(k, self.num_rows)
        vectors = torch.from_numpy(np.ascontiguousarray(queries))
        mask = None if allowed is None else torch.from_numpy(allowed)
        blocks = [self._search_block(block, k, mask) for block in vectors.split(QUERY_BLOCK)]
        scores, rows = (torch.cat(parts).tolist() for parts in zip(*blocks, strict=True))
        if allowed is None:
            return scores, rows
        return drop((scores, rows), allowed, k)

    @torch.inference_mode()
    def _search_block(self, queries: Tensor, k: int, allowed: Tensor | None) -> TopK:
        """Return at least the k best rows; all candidates, also others, if some are `allowed`."""
        num_rescored = self._config.rescore
        num_candidates = min(max(k, num_rescored) if num_rescored else k + MARGIN, self.num_rows)

        def search_shard(shard: Shard) -> TopK:
            with torch.inference_mode():  # a setting of each thread
                return shard.search(queries, num_candidates, self._config.tile_rows, allowed)

        results = (self._threads.map if self._threads else map)(search_shard, self.shards)
        candidates = reduce(lambda a, b: merge_top_k(a, b, num_candidates), results)[1]
        read = self.file_rows if num_rescored else self._stored_rows
        num_kept = k if allowed is None else num_candidates
        return rescore(queries, candidates, num_kept, read, self._flat.metric)

    def file_rows(self, rows: Tensor) -> Tensor:
        """Return rows (n, dim) of the file as float32, by their numbers (n,)."""
        return torch.from_numpy(self._flat.rows(rows.numpy()))

    def _stored_rows(self, rows: Tensor) -> Tensor:
        """Return stored rows (n, dim) of all shards as float32, by their numbers (n,)."""
        vectors = torch.empty((len(rows), self.dim))
        for shard in self.shards:
            in_shard = (rows >= shard.first_row) & (rows < shard.first_row + len(shard))
            vectors[in_shard] = shard.rows(rows[in_shard])
        return vectors


def rescore(
    queries: Tensor, candidates: Tensor, k: int, read: Callable[[Tensor], Tensor], metric: str
) -> TopK:
    """Return the k best of candidate rows (num_queries, n) by scores that are summed in float64.

    The scores are rounded to float32. `read` returns the float32 vectors (m, dim) of rows (m,).
    """
    num_candidates, dim = candidates.shape[1], queries.shape[1]
    step = max(1, SUM_VALUES // (num_candidates * dim))
    scores = torch.empty(candidates.shape)
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        vectors = read(candidates[block].flatten()).double().view(-1, num_candidates, dim)
        query = queries[block].double()[:, None]
        terms = -(query - vectors).square() if metric == "l2" else query * vectors
        scores[block] = terms.sum(dim=2).float()
    return select_top_k(scores, candidates, k)


def choose_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named devices, or all GPUs if none are named, or the CPU if there is no GPU."""
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return tuple(names) or gpus or ("cpu",)


def recall(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the fraction of the expected rows that were found, over all queries."""
    hits = sum(len(set(a) & set(b)) for a, b in zip(found, expected, strict=True))
    return hits / sum(map(len, expected))


def open_retriever(config: RetrieverConfig) -> Retriever:
    return open_dense(config, lambda file: TorchFlatIndex(FlatFile.open(file), config.torch))


def probe_queries(corpus: Corpus, encoder: Encoder) -> Vectors:
    """Return embeddings (at most NUM_PROBES, dim) of texts from a fixed sample of documents."""
    rows = random.Random(0).sample(range(len(corpus)), min(NUM_PROBES, len(corpus)))
    return encoder.encode_queries(
        [" ".join([d.title, *d.text.split()[:PROBE_WORDS]]) for d in corpus.documents(sorted(rows))]
    )


@torch.inference_mode()
def load_and_measure_recall(index: TorchFlatIndex, flat: FlatFile, queries: Vectors) -> float:
    """Load the index and return its recall@3 against float32, which is computed on the way."""
    probes = torch.from_numpy(queries)
    best: TopK | None = None

    def score_tile(first_row: int, tile: Tensor) -> None:
        nonlocal best
        scores = probes.to(tile.device) @ tile.T
        if flat.metric == "l2":
            scores = 2 * scores - tile.square().sum(dim=1)
        values, columns = top_columns(scores, PROBE_TOPK + MARGIN)
        top = values.cpu(), columns.cpu() + first_row
        best = top if best is None else merge_top_k(best, top, PROBE_TOPK + MARGIN)

    index.read_rows(score_tile)
    assert best is not None, "an index has at least one row"
    topk = min(PROBE_TOPK, flat.num_rows)
    exact = rescore(probes, best[1], topk, index.file_rows, flat.metric)
    return recall(index.search(queries, PROBE_TOPK)[1], exact[1].tolist())
