"""Where questions come from, and how methods put them."""

from dataclasses import replace

import pytest

from search_r1.evaluation.runner import METHODS, put, question_of
from tests.evaluation.worlds import row
from verl.data.rows import Row
from verl.errors import DataError


@pytest.mark.parametrize(
    ("prompt", "extra", "question"),
    [
        ("Do this. Question: who?\n", {}, "who?"),
        ("Do this. Question: who?", {"question": " whom? "}, "whom?"),
        (({"role": "system", "content": "Question: no"},
          {"role": "user", "content": "Question: a Question: b"}), {}, "b"),
        ("who?", {}, ""),
    ],
)  # fmt: skip
def test_the_question_is_found(prompt: object, extra: dict[str, str], question: str) -> None:
    """By name, else after the last mark of the last message."""
    assert question_of(replace(row(1), prompt=prompt, extra_info=extra)) == question


def test_the_agents_prompt_stays_that_of_the_data() -> None:
    """The agent is evaluated on what it is trained on."""
    assert put(row(1), METHODS["agent"]).prompt == row(1).prompt


@pytest.mark.parametrize("method", ["direct", "cot", "rag"])
def test_baselines_put_the_same_question(method: str) -> None:
    """As a message where the row has messages, as plain text where it has text."""
    of_messages = put(row(1), METHODS[method], "DOCS").prompt
    assert isinstance(of_messages, tuple)
    text = of_messages[0]["content"]
    assert text.endswith("Question: What is thing 1?\n")
    assert ("DOCS" in text) is (method == "rag")
    plain = replace(row(1), prompt="Question: What is thing 1?")
    assert put(plain, METHODS[method], "DOCS").prompt == text


def test_a_baseline_needs_the_question() -> None:
    """A prompt without one is refused with its row; the agent does not mind."""
    unknown: Row = replace(row(3), prompt="who?")
    with pytest.raises(DataError, match=r"rows\.jsonl#3"):
        put(unknown, METHODS["cot"])
    assert put(unknown, METHODS["agent"]).extra_info["question"] == ""
