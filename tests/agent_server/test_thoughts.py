"""What of the policy's text is shown as reasoning."""

import random

import pytest

from search_r1.agent import grammar
from search_r1.agent_server.streaming import Thoughts, reasoning

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
    """By hand: an empty line parts turns; what is no action stays readable."""
    assert reasoning(turns, TAGS, ["<|im_end|>"]) == expected


def test_a_template_brings_its_own_tags() -> None:
    """R1-Searcher searches within its thinking."""
    turns = ["<think> a <|begin_of_query|> q <|end_of_query|>", " b </think> <answer> c </answer>"]
    assert reasoning(turns, grammar.R1_SEARCHER) == "a\n\nb"


@pytest.mark.parametrize("seed", range(100))
def test_streamed_in_any_pieces_it_is_the_same(seed: int) -> None:
    """And nothing that was shown is ever taken back."""
    random_ = random.Random(seed)
    words = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<", " ",
             "\n", "a", "b c", "</s", "<|im_end|>", "<|im", "think>"]  # fmt: skip
    turns = ["".join(random_.choices(words, k=random_.randrange(9))) for _ in range(3)]
    thoughts, shown = Thoughts(TAGS, ["<|im_end|>"]), ""
    for turn in turns:
        while turn:
            count = random_.randrange(1, 5)
            shown += thoughts.say(turn[:count])
            turn = turn[count:]
        shown += thoughts.end_turn()
    assert shown == reasoning(turns, TAGS, ["<|im_end|>"])


def test_words_are_shown_at_once() -> None:
    """Only what may become a tag, and space at the end, waits."""
    thoughts = Thoughts(TAGS)
    assert [thoughts.say(part) for part in ("<thi", "nk> So", " it <", " x", "<sea", "rch> q")] == [
        "", "So", " it", " < x", "", "",
    ]  # fmt: skip
