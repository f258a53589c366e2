"""Parsing a server's counters."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.retrieval.servers import read_counters


def test_counters_are_read_as_prometheus_writes_them() -> None:
    """Sums and counts come back by name and label; buckets and comments do not."""
    registry = CollectorRegistry()
    stages = Histogram("stage_seconds", "Time.", ["stage"], registry=registry)
    stages.labels("encode").observe(0.25)
    stages.labels("encode").observe(0.5)
    counters = read_counters(generate_latest(registry).decode())
    assert counters['stage_seconds_sum{stage="encode"}'] == 0.75
    assert counters['stage_seconds_count{stage="encode"}'] == 2
    assert not any("bucket" in name for name in counters)
