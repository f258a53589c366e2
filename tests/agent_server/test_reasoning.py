"""Extraction of the reasoning that is shown to clients."""

import random

import pytest

from search_r1.agent import grammar
from search_r1.agent_server.streaming import ReasoningFilter, extract_reasoning

TAGS = grammar.SEARCH_R1


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["<think> Where? </think> <search> Oslo </search>"], "Where?"),
        (["<think> a </think>\n<search> q </search>", " <think>b</think><answer> c </answer>"],
         "a\n\nb"),
        (["<answer> c </answer>"], ""),
        (["", "<answer> c </answer>", "x"], "x"),
        (["1 < 2 <b> <think"], "1 < 2 <b> <think"),
        (["cut <search> never closed"], "cut <search> never closed"),
        (["a <search> lost <answer> c </answer>"], "a <search> lost"),
        (["done<|im_end|>"], "done"),
    ],
)  # fmt: skip
def test_thinking_without_tags_searches_and_answers(turns: list[str], expected: str) -> None:
    """A blank line separates turns; incomplete searches and answers stay visible."""
    assert extract_reasoning(turns, ReasoningFilter(TAGS, ["<|im_end|>"])) == expected


def test_a_template_brings_its_own_tags() -> None:
    """R1-Searcher's searches are inside the think block."""
    turns = ["<think> a <|begin_of_query|> q <|end_of_query|>", " b </think> <answer> c </answer>"]
    assert extract_reasoning(turns, ReasoningFilter(grammar.R1_SEARCHER)) == "a\n\nb"


@pytest.mark.parametrize("seed", range(100))
def test_streamed_in_any_pieces_it_is_the_same(seed: int) -> None:
    """Text streamed in random pieces gives the same reasoning as the whole text."""
    random_ = random.Random(seed)
    words = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<", " ",
             "\n", "a", "b c", "</s", "<|im_end|>", "<|im", "think>"]  # fmt: skip
    turns = ["".join(random_.choices(words, k=random_.randrange(9))) for _ in range(3)]
    reasoning, shown = ReasoningFilter(TAGS, ["<|im_end|>"]), ""
    for turn in turns:
        while turn:
            count = random_.randrange(1, 5)
            shown += reasoning.feed(turn[:count])
            turn = turn[count:]
        shown += reasoning.end_turn()
    assert shown == extract_reasoning(turns, ReasoningFilter(TAGS, ["<|im_end|>"]))


def test_words_are_shown_at_once() -> None:
    """Only text that may become a tag, and trailing space, is held back."""
    reasoning = ReasoningFilter(TAGS)
    parts = ("<thi", "nk> So", " it <", " x", "<sea", "rch> q")
    assert [reasoning.feed(part) for part in parts] == ["", "So", " it", " < x", "", ""]
