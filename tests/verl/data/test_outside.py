"""Control tokens in question files are broken up, except those that are meant."""

from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.grammar import SEARCH_R1
from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.retrieval.schema import Document
from tests.verl.agent.test_control import LAYOUTS, build, controls
from verl.agent import native
from verl.config import Config
from verl.data.outside import neutral_row, strings_of_rows
from verl.data.prompts import load_prompts, render
from verl.data.rows import Row

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def row(prompt: Any, **extra: Any) -> Row:
    return Row("f", 0, prompt, "nq", ("a",), extra)


def templated(layout: str) -> Any:
    tokenizer = build(layout, False)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_line_32_messages_of_rows_make_no_control_tokens(layout: str, template: str | None) -> None:
    """Whatever their contents and roles are, with and without a chat template."""
    tokenizer = build(layout, False)
    tokenizer.chat_template = template
    text = "".join(token for group in LAYOUTS[layout] for token in group)
    strings = strings_of_rows(tokenizer, SEARCH_R1)
    for messages in ([{"role": "user", "content": text}], [{"role": text, "content": "x"}]):
        ids = render(neutral_row(row(tuple(messages)), strings), tokenizer).ids
        own = controls(tokenizer) - set(tokenizer.encode("<think>", add_special_tokens=False))
        assert not own.intersection(ids)


def test_a_row_may_explain_the_tags_of_its_own_format() -> None:
    """Qwen3 has `<think>` and `<tool_call>` as tokens, which instructions name."""
    tokenizer = templated("qwen")
    prompt = ({"role": "user", "content": "<think> <tool_call> <|im_end|>"},)
    for tags, expected in (
        (SEARCH_R1, "<think> < tool_call> < |im_end|>"),
        (native.GRAMMAR, "<think> <tool_call> < |im_end|>"),
    ):
        [message] = neutral_row(row(prompt), strings_of_rows(tokenizer, tags)).prompt
        assert message == {"role": "user", "content": expected}


def test_a_prompt_that_was_rendered_before_keeps_its_turns_but_not_those_of_its_question() -> None:
    """The question is known by `extra_info.question`; without it the text stays as it is."""
    strings = strings_of_rows(build("qwen", False), SEARCH_R1)
    question = "Who?<|im_end|> x"
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    safe = neutral_row(row(text, question=f" {question}\n"), strings).prompt
    assert safe == text.replace("?<|", "?< |")
    for extra in ({}, {"question": None}, {"question": "Who?"}, {"question": "<|im_end|>"}):
        assert neutral_row(row(text, **extra), strings).prompt == text


def test_other_parts_of_messages_are_neutralised_too() -> None:
    """Templates also write tool calls; parquet fills missing fields with null."""
    call = {"function": {"name": "f", "arguments": {"q": ["[INST]", 3]}}}
    message = {"role": "assistant", "content": "", "name": None, "tool_calls": [call]}
    strings = strings_of_rows(templated("mistral"), SEARCH_R1)
    [safe] = neutral_row(row((message,)), strings).prompt
    arguments = {"q": ["[ INST]", 3]}
    expected = {"function": {"name": "f", "arguments": arguments}}
    assert safe == message | {"tool_calls": [expected]}


def test_documents_in_a_prompt_make_no_control_tokens() -> None:
    """`search-r1 data nq_rag` does not know the tokenizer; what it leaves, the run breaks up."""
    document = Document.from_title("1", "[/INST]", "[TOOL_CALLS] x </information> y")
    text = prompt_writer(PromptStyle.RAG)("Who?", [document])
    assert text.count("</information>") == 2  # in the instruction, and behind the documents
    tokenizer, prompt = templated("mistral"), ({"role": "user", "content": text},)
    safe = neutral_row(row(prompt), strings_of_rows(tokenizer, SEARCH_R1))
    assert not controls(tokenizer).intersection(render(safe, tokenizer).ids)


def test_a_run_breaks_up_the_rows_of_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says once how many they are."""
    file = tmp_path / "f.jsonl"
    line = '{"data_source": "nq", "prompt": %s, "reward_model": {"ground_truth": ["b"]}}\n'
    file.write_text(line % '[{"role": "user", "content": "Who?"}]'
                    + line % '[{"role": "user", "content": "Who [INST]?"}]')  # fmt: skip
    tokenizer = templated("mistral")
    strings = strings_of_rows(tokenizer, SEARCH_R1)
    prompts = load_prompts(Config(), str(file), None, tokenizer, reserved=strings)
    assert prompts[1].text == "user: Who [ INST]?\n"
    assert [record.args[:2] for record in caplog.records] == [(1, 2)]  # type: ignore[index]
