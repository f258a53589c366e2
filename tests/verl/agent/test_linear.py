"""Searches in texts of policies and documents take linear time and find what patterns find."""

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.agent.grammar import R1_SEARCHER, SEARCH_R1
from search_r1.evaluation.runner import read_untagged_answer
from search_r1.online.services import truncate
from search_r1.retrieval.tokenization import fold
from search_r1.rewards import RewardInput, RewardScores, build_reward
from search_r1.rewards.judge.message import parse_verdict
from search_r1.rewards.normalize import RULES, contains, covers
from search_r1.runs.dialogue import find_headings, read_dialogue
from verl.agent import native
from verl.agent.control import ControlStrings
from verl.agent.grammar import (
    action_pattern,
    answer_pattern,
    find_information,
    has_broken_tags,
    spans_between,
    think_ending_patterns,
)
from verl.agent.tags import neutralize, read_turn
from verl.errors import redact

TAG = SEARCH_R1.information
PARTS = ["<information>", "</information>", "<think>", "</think>", "<answer>", "</answer>",
         "<search>", "</search>", "<|", "|>", "answer", " is", ":", ".", " ", "\n", "x", '"', ")",
         "Doc 1(Title: \"", '", id: ']  # fmt: skip
HEADING = re.compile(
    r'^Doc \d+\(Title: "(?P<title>.*?)"(?:, id: (?P<id>[^)\n]*))?\) ?', re.MULTILINE
)
LEAD = re.compile(r".*\banswer\b[^.\n]*?(?:\bis\b|:)\s*:?\s*(?=\S)", re.IGNORECASE | re.DOTALL)
CONTROLS = ControlStrings(["<tool_call>", "[INST]", "<｜User｜>", "<a>", "éé", " \n"])
texts = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@given(texts)
def test_contents_are_those_of_the_lazy_pattern(text: str) -> None:
    """Also with openings that are never closed."""
    pattern = re.compile(f"{re.escape(TAG.opening)}(.*?){re.escape(TAG.closing)}", re.DOTALL)
    assert [text[a:b] for a, b in spans_between(text, TAG)] == pattern.findall(text)


@given(texts)
def test_an_untagged_answer_is_that_of_the_pattern(text: str) -> None:
    """The last statement in one sentence, without thoughts, tags and control tokens."""
    opening, closing = SEARCH_R1.think.opening, SEARCH_R1.think.closing
    bare = re.sub(f"{opening}.*?{closing}", " ", text, flags=re.DOTALL)
    for tag in SEARCH_R1.tags:
        bare = bare.replace(tag.opening, " ").replace(tag.closing, " ")
    bare = re.sub(r"<\|[^|<>]*\|>", " ", bare).strip()
    lead = LEAD.match(bare)
    expected = bare[lead.end() :].partition("\n")[0].strip() if lead else bare
    assert read_untagged_answer(text, SEARCH_R1) == expected


@given(texts)
def test_headings_are_those_of_the_pattern(text: str) -> None:
    """Titles may hold quotes and brackets; a heading ends on its line."""
    expected = [(m.start(), m.end(), m["title"], m["id"] or "") for m in HEADING.finditer(text)]
    assert [(h.start, h.end, h.title, h.id) for h in find_headings(text)] == expected


@given(st.text(st.sampled_from("a \n"), max_size=12), st.integers(1, 12))
def test_a_page_is_cut_at_white_space(text: str, max_chars: int) -> None:
    """As by removing the last white space and what follows it."""
    head = text[:max_chars]
    expected = text
    if len(text) > max_chars:
        shorter = re.sub(r"\s+\S*\Z", "", head) or head
        expected = head.rstrip() if text[max_chars].isspace() else shorter
    assert truncate(text, max_chars).rstrip() == expected.rstrip()


def dialogue_of(text: str) -> RewardInput:
    turns = [("policy", text), ("observation", text), ("policy", text)]
    return RewardInput([text, text], turns, ["x x"])  # type: ignore[arg-type]


def score(text: str) -> None:
    for name in ("em_format", "f1", "r1_searcher_stage_2"):
        build_reward(name, RewardScores())(dialogue_of(text))


def view(text: str) -> None:
    row = {"dialogue": text, "ground_truth": ["x"]}
    read_dialogue(row, SEARCH_R1)
    segments = [{"origin": o, "text": text} for o in ("policy", "observation", "policy")]
    read_dialogue({**row, "segments": segments, "components": {}}, SEARCH_R1)


READERS: dict[str, Callable[[str], object]] = {
    "information": lambda text: find_information(text, SEARCH_R1),
    "spans": lambda text: list(spans_between(text, TAG)),
    "answers": lambda text: answer_pattern(SEARCH_R1).findall(text),
    "actions": lambda text: action_pattern(R1_SEARCHER).findall(text),
    "thinking": lambda text: [p.search(text) for p in think_ending_patterns(SEARCH_R1)],
    "broken tags": lambda text: has_broken_tags(text, SEARCH_R1),
    "turn": lambda text: read_turn(text, SEARCH_R1),
    "neutralize": lambda text: neutralize(text, SEARCH_R1, CONTROLS),
    "native calls": lambda text: list(spans_between(text, native.CALL)),
    "untagged answer": lambda text: read_untagged_answer(text, SEARCH_R1),
    "headings": find_headings,
    "page": lambda text: truncate(text, len(text) - 1),
    "verdict": lambda text: parse_verdict(text, "yes_no"),
    "squad": RULES["squad"], "unicode": lambda text: RULES["unicode"](text + "é"),
    "folding": lambda text: fold(text + "é"),
    "containment": lambda text: contains(text, "x x"), "cover": lambda text: covers(text, ["x x"]),
    "redaction": redact, "rewards": score, "view": view,
}  # fmt: skip
UNITS = ["<information>", "</information>", "<think>", "<think> ", "<answer>", "<search>",
         "<answer><search>", "<tool_call>", "<|", "<", " ", "\n", "x ", "answer ", "is ", "a:",
         "answer is ", 'Doc 1(Title: "', '", id: ', "\nDoc 1(Title: \"a\", id: ", "<a>", "://",
         "?key=", "<think></think> ", "é", "e\u0301", "[INST",
         "<｜User｜>", "＜tool_call＞"]  # fmt: skip

HEADS = ("", "the answer ", 'Doc 1(Title: ") "')
HEADED = {"untagged answer", "headings", "turn", "rewards", "view", "information"}
"""Readers that read on after such a beginning."""


@pytest.mark.parametrize("reader", READERS)
def test_no_repetition_of_a_text_takes_quadratic_time(reader: str) -> None:
    """200,000 characters of any unit take less than two seconds of this process; quadratic, more.

    The bound is coarse on purpose: linear readers need a twentieth of it.
    """
    for unit in UNITS:
        for head in HEADS if reader in HEADED else HEADS[:1]:
            text = head + unit * (200_000 // len(unit))
            start = time.process_time()
            READERS[reader](text)
            seconds = time.process_time() - start
            assert seconds < 2, f"{unit!r} * {200_000 // len(unit)}: {seconds:.1f} s"
