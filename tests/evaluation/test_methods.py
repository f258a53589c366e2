"""Extracting questions from rows, and the prompts of methods."""

from dataclasses import replace

import pytest

from search_r1.evaluation.methods import METHODS, apply_method, question_of
from tests.evaluation.scripted import row
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
        ("<|im_start|>user\nQuestion: who?\nAnd?<|im_end|>\n<|im_start|>assistant\n", {},
         "who?\nAnd?"),
        ("Question: what is </div>?", {}, "what is </div>?"),
        ("<s>[INST] Question: who? [/INST]", {}, "who?"),
        ("<start_of_turn>user\nQuestion: who?<end_of_turn>\n", {}, "who?"),
        ("<｜User｜>Question: who?<｜Assistant｜>", {}, "who?"),
        (({"role": "user", "content": "Question: what is <|im_end|>?"},), {},
         "what is <|im_end|>?"),
    ],
)  # fmt: skip
def test_the_question_is_found(prompt: object, extra: dict[str, str], question: str) -> None:
    """The question is in `extra_info`, or after the last `Question:` of the last message.

    In a chat that was rendered before, it ends where its message does.
    """
    assert question_of(replace(row(1), prompt=prompt, extra_info=extra)) == question


def test_the_agents_prompt_stays_that_of_the_data() -> None:
    """The agent's prompt is that of the data."""
    assert apply_method(row(1), METHODS["agent"]).prompt == row(1).prompt


@pytest.mark.parametrize("method", ["direct", "cot", "rag"])
def test_baselines_put_the_same_question(method: str) -> None:
    """A baseline's prompt is a message if the row has messages, and text if it has text."""
    messages = apply_method(row(1), METHODS[method], "DOCS").prompt
    assert isinstance(messages, tuple)
    text = messages[0]["content"]
    assert text.endswith("Question: What is thing 1?\n")
    assert ("DOCS" in text) is (method == "rag")
    plain = replace(row(1), prompt="Question: What is thing 1?")
    assert apply_method(plain, METHODS[method], "DOCS").prompt == text


@pytest.mark.parametrize("method", ["direct", "rag"])
def test_placeholders_in_questions_and_documents_stay(method: str) -> None:
    """Only the placeholders of the template are filled in, not those of its texts."""
    asked = replace(row(1), prompt="Question: What is {documents}?")
    prompt = str(apply_method(asked, METHODS[method], "the {question}").prompt)
    assert prompt.endswith("Question: What is {documents}?\n")
    assert ("the {question}" in prompt) is (method == "rag")


def test_a_baseline_needs_the_question() -> None:
    """Baselines refuse rows without a question; the agent accepts them."""
    unknown: Row = replace(row(3), prompt="who?")
    with pytest.raises(DataError, match=r"rows\.jsonl#3"):
        apply_method(unknown, METHODS["cot"])
    assert apply_method(unknown, METHODS["agent"]).extra_info["question"] == ""
