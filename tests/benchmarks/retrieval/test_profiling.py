"""Shares of functions in a profile of collapsed stacks."""

import pytest

from benchmarks.retrieval.profiling import shares

STACKS = """main (a.py:1);search (b.py:5);parse (c.py:9) 6
main (a.py:1);search (b.py:6) 3
main (a.py:2);parse (c.py:8);parse (c.py:9) 1
"""


def test_shares_of_functions() -> None:
    """Lines of one function count together, and only the innermost function counts."""
    assert shares(STACKS) == pytest.approx({"parse (c.py)": 0.7, "search (b.py)": 0.3})


def test_a_profile_without_samples_has_no_shares() -> None:
    """An empty file is valid."""
    assert shares("") == {}
