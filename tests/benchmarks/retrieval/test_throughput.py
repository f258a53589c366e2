"""The order of repeated queries."""

from collections import Counter

from benchmarks.retrieval.throughput import REPEATS, WINDOW, repeat_and_shuffle


def test_every_query_is_repeated_within_its_window() -> None:
    """Each query occurs five times within fifty requests."""
    queries = [f"q{i}" for i in range(25)]
    repeated = repeat_and_shuffle(queries)
    assert Counter(repeated) == dict.fromkeys(queries, REPEATS)
    for start in range(0, len(queries), WINDOW):
        window = repeated[start * REPEATS : (start + WINDOW) * REPEATS]
        assert set(window) == set(queries[start : start + WINDOW])
    assert repeated != sorted(repeated)
