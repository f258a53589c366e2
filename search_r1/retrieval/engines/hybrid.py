"""A hybrid of local engines, such as `bm25+e5`: the hits of all are joined and ranked again.

Each engine contributes its best `--fusion_depth` rows. By `scores`, each engine's are scaled to
0 … 1 for each query, and the weighted sum ranks; by `ranks`, the weighted sum of 1 / (60 + rank)
does. A row that an engine did not find, or scored 0 like all others, gets nothing from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from search_r1.retrieval.corpus import Mask
from search_r1.retrieval.engines.base import Ranking, RowRetriever, stage
from search_r1.retrieval.engines.filtered import attach_fields
from search_r1.retrieval.engines.fusion import joined, reciprocal
from search_r1.retrieval.engines.registry import open_part
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import FusionConfig, RetrieverConfig
from verl.errors import explain


class HybridRetriever(RowRetriever):
    """Engines over one corpus, whose rankings are joined."""

    num_threads = 1

    def __init__(self, name: str, parts: Sequence[RowRetriever], config: FusionConfig) -> None:
        """Raises SetupError if there is not a weight for each engine."""
        self.name, self.corpus = name, parts[0].corpus
        self.num_documents = len(self.corpus)
        self.cuts = tuple(cuts for part in parts for cuts in getattr(part, "cuts", ()))
        self.parts = dict(zip(name.split("+"), parts, strict=True))
        """The engines by name."""
        if with_fields := [part for part in parts if part.fields]:
            attach_fields(self, with_fields[0].fields, with_fields[0].filter_fields)
        self._config = config
        self._weights = config.fusion_weights or tuple(part.weight for part in parts)
        if len(self._weights) != len(parts) or not any(self._weights):
            fix = f"--fusion_weights {' '.join(['0.5'] * len(parts))}"
            expected = f"a number for each of {name}, not all 0"
            raise SetupError(explain("--fusion_weights", self._weights, expected, fix))

    def rank(self, queries: Sequence[str], k: int, allowed: Mask | None = None) -> Ranking:
        depth = max(k, self._config.fusion_depth)
        rankings = [part.rank(queries, depth, allowed) for part in self.parts.values()]
        with stage("fusion"):
            by_query = zip(*(zip(*ranking, strict=True) for ranking in rankings), strict=True)
            ranked = [joined(self._shares(found))[:k] for found in by_query]
        return [[s for _, s in hits] for hits in ranked], [[r for r, _ in hits] for hits in ranked]

    def explain(self, query: str, k: int) -> list[dict[str, float]]:
        """Return each hit's engines, with what they give to its score."""
        depth = max(k, self._config.fusion_depth)
        rankings = [part.rank([query], depth) for part in self.parts.values()]
        shares = list(self._shares((scores[0], rows[0]) for scores, rows in rankings))
        by_name = {n: dict(zip(*s, strict=True)) for n, s in zip(self.parts, shares, strict=True)}
        rows = [row for row, _ in joined(shares)[:k]]
        return [{n: s[row] for n, s in by_name.items() if row in s} for row in rows]

    def _shares(
        self, found: Iterable[tuple[Sequence[float], Sequence[int]]]
    ) -> Iterator[tuple[Sequence[int], list[float]]]:
        """Yield the rows that each engine found for a query, and what it gives to each."""
        for weight, (scores, rows) in zip(self._weights, found, strict=True):
            if not any(scores):  # none, or the encoder knows no word of the query
                yield (), []
                continue
            is_scaled = self._config.fusion == "scores"
            values = _scaled(scores) if is_scaled else reciprocal(len(rows))
            yield rows, [weight * value for value in values]

    def info(self) -> dict[str, Any]:
        parts = [part.info() for part in self.parts.values()]  # type: ignore[attr-defined]
        weights = list(self._weights)
        depth = self._config.fusion_depth
        fusion = {"by": self._config.fusion, "weights": weights, "depth": depth}
        return {"engine": "hybrid", "fusion": fusion, "parts": parts}


def _scaled(scores: Sequence[float]) -> list[float]:
    """Return scores scaled to 0 … 1, or 1 for each if all are equal."""
    low, span = scores[-1], scores[0] - scores[-1]
    return [(score - low) / span for score in scores] if span else [1.0] * len(scores)


def open_retriever(config: RetrieverConfig) -> HybridRetriever:
    """Open the engines that the name lists. Raises SetupError for one that ranks no rows."""
    names = config.retriever_name.split("+")
    if len(set(names)) < len(names) or not all(names):
        expected = "different engines, such as bm25+e5"
        raise SetupError(explain("--retriever_name", config.retriever_name, expected, "bm25+e5"))
    parts = []
    for name in names:
        part = open_part(replace(config, retriever_name=name))
        if not isinstance(part, RowRetriever):
            expected = "engines that rank the rows of --corpus_path: bm25 and dense ones"
            fix = f"leave {name} out"
            raise SetupError(explain("--retriever_name", config.retriever_name, expected, fix))
        parts.append(part)
    return HybridRetriever(config.retriever_name, parts, config.fusion)
