"""Searches in the text of a dialogue, compared with slow patterns."""

import re

from hypothesis import given
from hypothesis import strategies as st

from search_r1.agent.grammar import R1_SEARCHER, SEARCH_R1
from verl.agent.grammar import Grammar, find_information


@given(
    st.sampled_from([SEARCH_R1, R1_SEARCHER]),
    st.lists(st.sampled_from(["(", ")", "x", "\n", "<", "information>"]), max_size=12),
)
def test_information_is_what_a_pattern_finds(grammar: Grammar, parts: list[str]) -> None:
    """The greedy pattern, quadratic in the number of openings, finds the same text."""
    opening, closing = grammar.information.opening, grammar.information.closing
    text = "".join({"(": opening, ")": closing}.get(part, part) for part in parts)
    found = re.search(f"{re.escape(opening)}(.*){re.escape(closing)}", text, re.DOTALL)
    assert find_information(text, grammar) == (found[1] if found else None)
