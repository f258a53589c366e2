"""The cache in memory against a plain list of what was used last."""

from hypothesis import given
from hypothesis import strategies as st

from search_r1.search.server.cache import DOCUMENTS_PER_ENTRY, ResultCache
from tests.search.server.engines import hits_of

KEYS = st.tuples(st.sampled_from("abcdef"), st.integers(0, 9))
STEPS = st.lists(st.tuples(st.booleans(), KEYS), max_size=60)


@given(entries=st.integers(0, 4), steps=STEPS)
def test_it_keeps_the_most_recent(entries: int, steps: list[tuple[bool, tuple[str, int]]]) -> None:
    """Reads and writes agree with a list in the order of use, bounded in both ways."""
    cache, recent = ResultCache(entries), []
    for is_write, key in steps:
        expected = hits_of(*key) if key in recent else None
        if is_write:
            cache.put(key, hits_of(*key))
        else:
            assert cache.get(key) == expected
        if is_write or expected is not None:
            recent = [key, *(other for other in recent if other != key)]
        while len(recent) > entries or sum(k for _, k in recent) > DOCUMENTS_PER_ENTRY * entries:
            recent.pop()
        assert len(cache) == len(recent)
