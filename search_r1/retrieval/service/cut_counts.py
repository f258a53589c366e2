"""Metrics of the texts that models with an input limit read and cut."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from search_r1.retrieval.encoders.cuts import Cuts

ENCODED = "retriever_encoded_texts", "Texts encoded or reranked, by kind"
CUT = "retriever_cut_texts", "Those of more tokens than are read"


class CutCollector(Collector):
    """Reads the counts of cut texts when the metrics are read."""

    def __init__(self, cuts: Sequence[Cuts]) -> None:
        self._cuts = cuts

    def collect(self) -> Iterator[CounterMetricFamily]:
        encoded = CounterMetricFamily(*ENCODED, labels=["kind"])
        cut = CounterMetricFamily(*CUT, labels=["kind"])
        for counts in self._cuts:
            encoded.add_metric([counts.what], counts.num_texts)
            cut.add_metric([counts.what], counts.num_cut)
        yield from (encoded, cut)
