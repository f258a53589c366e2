"""The order of repeated queries."""

from collections import Counter

from benchmarks.retrieval.throughput import REPEATS, WINDOW, repeated


def test_every_query_is_repeated_within_its_window() -> None:
    """Each query comes five times, all within fifty requests."""
    queries = [f"q{i}" for i in range(25)]
    asked = repeated(queries)
    assert Counter(asked) == dict.fromkeys(queries, REPEATS)
    for start in range(0, len(queries), WINDOW):
        window = asked[start * REPEATS : (start + WINDOW) * REPEATS]
        assert set(window) == set(queries[start : start + WINDOW])
    assert asked != sorted(asked)
