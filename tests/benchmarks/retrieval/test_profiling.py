"""Shares of a profile from collapsed stacks."""

import pytest

from benchmarks.retrieval.profiling import shares

STACKS = """main (a.py:1);search (b.py:5);parse (c.py:9) 6
main (a.py:1);search (b.py:6) 3
main (a.py:2);parse (c.py:8);parse (c.py:9) 1
"""


def test_shares_by_hand() -> None:
    """Lines of one function count together; only the innermost function counts."""
    assert shares(STACKS) == pytest.approx({"parse (c.py)": 0.7, "search (b.py)": 0.3})


def test_shares_of_nothing() -> None:
    """A profile without samples has no shares."""
    assert shares("") == {}
