"""Tag grammars of search dialogues, shared by agents and rewards; plain text, no tensors."""

from verl.agent.grammar import (
    Grammar,
    Tag,
    answer_pattern,
    find_information,
    spans_between,
    tag_pattern,
    think_ending_patterns,
)

__all__ = [
    "R1_SEARCHER",
    "SEARCH_R1",
    "Grammar",
    "answer_pattern",
    "find_information",
    "spans_between",
    "tag_pattern",
    "think_ending_patterns",
]

SEARCH_R1 = Grammar(tools=(("search", Tag("<search>", "</search>")),))
"""Tags of Search-R1 (Jin et al. 2025): think, search, information, think again, answer."""

R1_SEARCHER = Grammar(
    tools=(("search", Tag("<|begin_of_query|>", "<|end_of_query|>")),),
    information=Tag("<|begin_of_documents|>", "<|end_of_documents|>"),
    acts_in_think=True,
)
"""Tags of R1-Searcher (Song et al. 2025): all searches inside one think block, then the answer."""
