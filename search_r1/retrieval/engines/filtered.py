"""Limits a local engine to the rows of the corpus that a request's `filter` leaves."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from search_r1.retrieval.corpus import Mask
from search_r1.retrieval.engines.base import Filter, Ranking, RowRetriever, stage
from search_r1.retrieval.fields import Fields
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.schema import Hit


class FilteredRows:
    """The best rows that a filter leaves, with the scores that they have in the whole corpus."""

    def __init__(self, engine: RowRetriever, filter: Filter) -> None:
        self.name, self.num_threads = engine.name, 1
        self.num_documents = engine.num_documents
        self._engine, self._filter = engine, filter

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with stage("filter"):
            allowed = self._engine.fields.mask(self._filter)
        return self._engine.hits(self._engine.rank(queries, k, allowed))

    def info(self) -> dict[str, Any]:
        return {"filter": self._filter}


def drop(ranking: Ranking, allowed: Mask, k: int) -> Ranking:
    """Return the first `k` hits of each query among the `allowed` rows (num_documents,)."""
    kept = [
        [pair for pair in zip(*hits, strict=True) if allowed[pair[1]]][:k]
        for hits in zip(*ranking, strict=True)
    ]
    return [[s for s, _ in hits] for hits in kept], [[r for _, r in hits] for hits in kept]


def attach(engine: RowRetriever, folder: Path, manifest: Manifest) -> None:
    """Read the fields of an index, if it has any, for an engine that searches it."""
    if manifest.filter_fields:
        attach_fields(engine, Fields.open(folder, manifest.count), manifest.filter_fields)


def attach_fields(engine: RowRetriever, fields: Fields, names: tuple[str, ...]) -> None:
    """Let an engine filter by fields of its rows."""
    engine.fields, engine.filter_fields = fields, names
    engine.filtered = partial(FilteredRows, engine)
