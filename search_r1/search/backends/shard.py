"""Consecutive rows of a matrix on one device, as floats or int8 codes, and the best of them.

Equal scores rank by row, whatever the tiling.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from search_r1.search.backends.flat_file import FlatFile

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
CPU_TILE_ROWS = 8192
"""Most rows that a CPU scores at a time: their scores stay in its cache."""

Best = tuple[Tensor, Tensor]
"""Scores (num_queries, k) float, best first, and their rows (num_queries, k) int64."""
Product = Callable[[int, int], Tensor]
"""Inner products of the queries with the rows [start, end): (num_queries, n) float32."""


class Shard:
    """Consecutive rows on one device."""

    def __init__(self, device: str, first_row: int, num_rows: int, flat: FlatFile, dtype: str):
        """Room for the rows; `fill` brings them."""
        self.device = torch.device(device)
        self.first_row = first_row
        self._values = torch.empty((num_rows, flat.dim), dtype=DTYPES[dtype], device=self.device)
        self._scales = torch.empty(num_rows, device=self.device) if dtype == "int8" else None
        self._norms = torch.empty(num_rows, device=self.device) if flat.metric == "l2" else None
        self._tile: Tensor | None = None

    def __len__(self) -> int:
        return len(self._values)

    def fill(self, start: int, tile: Tensor) -> bool:
        """Store float32 rows (n, dim) from `start` of this shard on; whether all are finite."""
        rows = slice(start, start + len(tile))
        if self._scales is not None:
            tile, self._scales[rows] = quantize(tile)
        self._values[rows] = tile
        if self._norms is not None:
            self._norms[rows] = self._widened(rows).square().sum(dim=1)
        stored = self._values[rows] if self._scales is None else self._scales[rows]
        return bool(torch.stack(stored.aminmax()).isfinite().all())

    def best(self, queries: Tensor, k: int, tile_rows: int) -> Best:
        """The k best candidates of (num_queries, dim) float32 queries; rows of the whole matrix."""
        queries = queries.to(self.device)
        if self.device.type == "cpu":
            tile_rows = min(tile_rows, CPU_TILE_ROWS)
        product = self._product(queries)
        best: Best | None = None
        for start in range(0, len(self), tile_rows):
            end = min(start + tile_rows, len(self))
            scores = product(start, end)
            if self._norms is not None:
                scores = scores.mul_(2).sub_(self._norms[start:end])
            best = _improve(best, scores, self.first_row + start, k)
        assert best is not None, "a shard has at least one row"
        return best[0].cpu(), best[1].cpu()

    def rows(self, rows: Tensor) -> Tensor:
        """Stored rows (n, dim) float32 on the host, by their numbers in the whole matrix."""
        return self._widened((rows - self.first_row).to(self.device)).cpu()

    def _widened(self, rows: slice | Tensor) -> Tensor:
        """Stored rows as float32."""
        values = self._values[rows].float()
        return values if self._scales is None else values * self._scales[rows][:, None]

    def _product(self, queries: Tensor) -> Product:
        values, on_cpu = self._values, self.device.type == "cpu"
        if self._scales is not None:
            return self._int8(queries, self._scales)
        if values.dtype == torch.float32:
            return lambda start, end: (values[start:end] @ queries.T).T
        if on_cpu:
            return lambda start, end: queries @ self._buffered(start, end).T
        half = queries.to(values.dtype)
        return lambda start, end: torch.mm(half, values[start:end].T, out_dtype=torch.float32)

    def _int8(self, queries: Tensor, scales: Tensor) -> Product:
        """On a CPU products of integers, several times as fast as float32, also of the queries.

        On a GPU products in float16, which holds every int8 exactly, summed in float32.
        """
        if self.device.type == "cpu":
            codes, query_scales = quantize(queries)

            def product(start: int, end: int) -> Tensor:
                sums = torch._int_mm(codes, self._values[start:end].T)
                return sums.float().mul_(scales[start:end]).mul_(query_scales[:, None])

            return product
        largest = queries.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        half = (queries / largest).half()

        def on_gpu(start: int, end: int) -> Tensor:
            sums = torch.mm(half, self._values[start:end].half().T, out_dtype=torch.float32)
            return sums.mul_(scales[start:end]).mul_(largest)

        return on_gpu

    def _buffered(self, start: int, end: int) -> Tensor:
        """The rows in float32, in one buffer: fresh memory for each tile would cost more."""
        if self._tile is None or len(self._tile) < end - start:
            self._tile = torch.empty((end - start, self._values.shape[1]))
        return self._tile[: end - start].copy_(self._values[start:end])


def _improve(best: Best | None, scores: Tensor, first_row: int, k: int) -> Best:
    """The k best after one more tile of scores (num_queries, n), whose rows come after all before.

    The further a scan is, the fewer tiles hold anything: only queries whose highest score beats
    their k-th best are looked at, since an equal one would lose to the earlier row.
    """
    if best is None or best[0].shape[1] < k:
        values, columns = best_columns(scores, k)
        found = values, columns + first_row
        return found if best is None else merge(best, found, k)
    hot = (scores.amax(dim=1) > best[0][:, -1]).nonzero().flatten()
    if not len(hot):
        return best
    values, columns = best_columns(scores[hot], k)
    merged = merge((best[0][hot], best[1][hot]), (values, columns + first_row), k)
    return best[0].index_copy(0, hot, merged[0]), best[1].index_copy(0, hot, merged[1])


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes (n, dim) and scales (n,), largest magnitude over 127: code · scale."""
    scales = vectors.abs().amax(dim=1) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # nan stays, to be seen
    return (vectors / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def best_columns(scores: Tensor, k: int) -> Best:
    """The k highest of (num_queries, n) scores, ties by column, which torch.topk leaves open."""
    if k >= scores.shape[1]:
        return _stable(scores, torch.arange(scores.shape[1], device=scores.device))
    values, columns = scores.topk(k + 1, dim=1)
    is_tied = values[:, k - 1] == values[:, k]
    columns = columns[:, :k]
    for query in is_tied.nonzero().flatten().tolist():
        columns[query] = _lowest_columns(scores[query], values[query, k - 1], k)
    columns = columns.sort(dim=1).values
    return _stable(scores.gather(1, columns), columns)


def _lowest_columns(scores: Tensor, least: Tensor, k: int) -> Tensor:
    """The k columns of one query that score more than `least`, then the first that equal it."""
    above = (scores > least).nonzero().flatten()
    equal = (scores == least).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def _stable(values: Tensor, rows: Tensor) -> Best:
    """Both by falling value; equal values keep their order."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, rows.expand_as(values).gather(1, order)


def merge(first: Best, second: Best, k: int) -> Best:
    """The k best of two lists of best rows, where all rows of `second` come after `first`'s."""
    values = torch.cat([first[0], second[0]], dim=1)
    values, rows = _stable(values, torch.cat([first[1], second[1]], dim=1))
    return values[:, :k], rows[:, :k]


def by_score_then_row(scores: Tensor, rows: Tensor, k: int) -> Best:
    """The k best of rows that come in any order."""
    rows, order = rows.sort(dim=1)
    values, rows = _stable(scores.gather(1, order), rows)
    return values[:, :k], rows[:, :k]
