"""Consecutive rows of a matrix on one device, as floats or int8 codes, and top-k search in them.

Equal scores rank by row, whatever the tile size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from search_r1.retrieval.engines.flat_file import FlatFile

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8")}
CPU_TILE_ROWS = 8192
"""Maximum number of rows that a CPU scores at a time, so that their scores stay in its cache."""

TopK = tuple[Tensor, Tensor]
"""Scores (num_queries, k) float, best first, and their rows (num_queries, k) int64."""
InnerProducts = Callable[[int, int], Tensor]
"""Computes the inner products (num_queries, n) float32 of the queries and rows [start, end)."""


class Shard:
    """Consecutive rows of a matrix on one device."""

    def __init__(self, device: str, first_row: int, num_rows: int, flat: FlatFile, dtype: str):
        """Allocate memory for the rows, which `store` fills."""
        self.device = torch.device(device)
        self.first_row = first_row
        self._values = torch.empty((num_rows, flat.dim), dtype=DTYPES[dtype], device=self.device)
        self._scales = torch.empty(num_rows, device=self.device) if dtype == "int8" else None
        self._norms = torch.empty(num_rows, device=self.device) if flat.metric == "l2" else None
        self._tile: Tensor | None = None

    def __len__(self) -> int:
        return len(self._values)

    def store(self, start: int, tile: Tensor) -> bool:
        """Store float32 rows (n, dim) from `start` on; returns whether all values are finite."""
        rows = slice(start, start + len(tile))
        if self._scales is not None:
            tile, self._scales[rows] = quantize(tile)
        self._values[rows] = tile
        if self._norms is not None:
            self._norms[rows] = self._as_float32(rows).square().sum(dim=1)
        stored = self._values[rows] if self._scales is None else self._scales[rows]
        return bool(torch.stack(stored.aminmax()).isfinite().all())

    def search(
        self, queries: Tensor, k: int, tile_rows: int, allowed: Tensor | None = None
    ) -> TopK:
        """Return the k best rows for (num_queries, dim) float32 queries, on the CPU.

        Rows are numbered as in the matrix; `tile_rows` of them are scored at a time. Those that are
        not `allowed` (num_rows of the matrix,) come last, with the score -inf.
        """
        queries = queries.to(self.device)
        if self.device.type == "cpu":
            tile_rows = min(tile_rows, CPU_TILE_ROWS)
        inner_products = self._inner_products(queries)
        best: TopK | None = None
        for start in range(0, len(self), tile_rows):
            end = min(start + tile_rows, len(self))
            scores = inner_products(start, end)
            if self._norms is not None:
                scores = scores.mul_(2).sub_(self._norms[start:end])
            if allowed is not None:
                tile = allowed[self.first_row + start : self.first_row + end].to(self.device)
                scores = scores.masked_fill(~tile, -torch.inf)
            best = _add_tile(best, scores, self.first_row + start, k)
        assert best is not None, "a shard has at least one row"
        return best[0].cpu(), best[1].cpu()

    def rows(self, rows: Tensor) -> Tensor:
        """Return stored rows (n, dim) as float32 on the CPU, by their numbers in the matrix."""
        return self._as_float32((rows - self.first_row).to(self.device)).cpu()

    def _as_float32(self, rows: slice | Tensor) -> Tensor:
        values = self._values[rows].float()
        return values if self._scales is None else values * self._scales[rows][:, None]

    def _inner_products(self, queries: Tensor) -> InnerProducts:
        values = self._values
        if self._scales is not None:
            return self._int8_inner_products(queries, self._scales)
        if values.dtype == torch.float32:
            return lambda start, end: (values[start:end] @ queries.T).T
        if self.device.type == "cpu":
            return lambda start, end: queries @ self._float32_tile(start, end).T
        half = queries.to(values.dtype)
        return lambda start, end: torch.mm(half, values[start:end].T, out_dtype=torch.float32)

    def _int8_inner_products(self, queries: Tensor, scales: Tensor) -> InnerProducts:
        """Return a function that computes inner products with the int8 codes.

        A CPU multiplies integers, several times as fast as float32; the queries are quantized too.
        A GPU multiplies in float16, which represents every int8 exactly, and sums in float32.
        """
        if self.device.type == "cpu":
            codes, query_scales = quantize(queries)

            def on_cpu(start: int, end: int) -> Tensor:
                sums = torch._int_mm(codes, self._values[start:end].T)
                return sums.float().mul_(scales[start:end]).mul_(query_scales[:, None])

            return on_cpu
        largest = queries.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        half = (queries / largest).half()

        def on_gpu(start: int, end: int) -> Tensor:
            sums = torch.mm(half, self._values[start:end].half().T, out_dtype=torch.float32)
            return sums.mul_(scales[start:end]).mul_(largest)

        return on_gpu

    def _float32_tile(self, start: int, end: int) -> Tensor:
        """Return the rows as float32 in a reused buffer, since new memory for each tile is slow."""
        if self._tile is None or len(self._tile) < end - start:
            self._tile = torch.empty((end - start, self._values.shape[1]))
        return self._tile[: end - start].copy_(self._values[start:end])


def _add_tile(best: TopK | None, scores: Tensor, first_row: int, k: int) -> TopK:
    """Update the k best rows with the scores (num_queries, n) of one more tile.

    All rows of the tile come after those of `best`, so an equal score does not replace an earlier
    row. Only queries with a score above their k-th best are updated: few in late tiles.
    """
    if best is None or best[0].shape[1] < k:
        values, columns = top_columns(scores, k)
        top_of_tile = values, columns + first_row
        return top_of_tile if best is None else merge_top_k(best, top_of_tile, k)
    improved = (scores.amax(dim=1) > best[0][:, -1]).nonzero().flatten()
    if not len(improved):
        return best
    values, columns = top_columns(scores[improved], k)
    merged = merge_top_k((best[0][improved], best[1][improved]), (values, columns + first_row), k)
    return best[0].index_copy(0, improved, merged[0]), best[1].index_copy(0, improved, merged[1])


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes (n, dim) and scales (n,): the largest magnitude of a vector over 127."""
    scales = vectors.abs().amax(dim=1) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # keeps nan, for `store`
    return (vectors / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def top_columns(scores: Tensor, k: int) -> TopK:
    """Return the k highest of (num_queries, n) scores, ties by column, unlike torch.topk."""
    if k >= scores.shape[1]:
        return _sort_descending(scores, torch.arange(scores.shape[1], device=scores.device))
    values, columns = scores.topk(k + 1, dim=1)
    is_tied = values[:, k - 1] == values[:, k]
    columns = columns[:, :k]
    for query in is_tied.nonzero().flatten().tolist():
        columns[query] = _first_columns_from(scores[query], values[query, k - 1], k)
    columns = columns.sort(dim=1).values
    return _sort_descending(scores.gather(1, columns), columns)


def _first_columns_from(scores: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Return the columns of one query above `threshold`, then the first that equal it: k in all."""
    above = (scores > threshold).nonzero().flatten()
    equal = (scores == threshold).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def _sort_descending(values: Tensor, rows: Tensor) -> TopK:
    """Sort both by descending value; equal values keep their order."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, rows.expand_as(values).gather(1, order)


def merge_top_k(first: TopK, second: TopK, k: int) -> TopK:
    """Return the k best of two results, where all rows of `second` come after those of `first`."""
    values = torch.cat([first[0], second[0]], dim=1)
    values, rows = _sort_descending(values, torch.cat([first[1], second[1]], dim=1))
    return values[:, :k], rows[:, :k]


def select_top_k(scores: Tensor, rows: Tensor, k: int) -> TopK:
    """Return the k best of rows that are given in any order, by score and then by row."""
    rows, order = rows.sort(dim=1)
    values, rows = _sort_descending(scores.gather(1, order), rows)
    return values[:, :k], rows[:, :k]
