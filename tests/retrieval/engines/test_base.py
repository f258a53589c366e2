"""Stage timing."""

import time

from search_r1.retrieval.engines.base import collect, stage


def test_stages_add_up_inside_a_collection_only() -> None:
    """Repeated stages are summed, nothing is kept outside, and nested collections are separate."""
    with stage("lost"):
        pass
    with collect() as outer:
        for _ in range(2):
            with stage("search"):
                time.sleep(0.002)
        with collect() as inner, stage("encode"):
            pass
    assert set(outer) == {"search"} and set(inner) == {"encode"}
    assert outer["search"] >= 0.004
