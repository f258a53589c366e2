"""Messages become the prompt that was meant: none is left out, and nothing ends it."""

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.data.prompts import render
from verl.data.rows import Message, Row, load_rows
from verl.data.validation import validate
from verl.errors import DataError

EOS, BOS = "<|end|>", "<|begin|>"
SYSTEM, ASKED = " Write <x> query </x>.\n\nBriefly.\n", "Who?"
MESSAGES = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED})
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
)
WHOLE = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "trimmed": "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
    "in the user's turn": "[{{ messages[0].content | trim }}\n\n{{ messages[1].content }}]",
    "with a switch taken out":
        "{{ messages[0].content | replace('Briefly', '') }}{{ messages[1].content }}",
    "as JSON": "{{ messages[0].content | tojson }}{{ messages[1].content }}",
}  # fmt: skip
LLAMA_ASKS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}({{ m.content }})"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)


def build(template: str | None = None, special: str = "$A") -> Any:
    """Return a tokenizer of bytes whose post-processor adds special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens([EOS, BOS])
    tokens = [(text, core.token_to_id(text)) for text in (EOS, BOS)]
    core.post_processor = processors.TemplateProcessing(single=special, special_tokens=tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, bos_token=BOS, chat_template=template
    )


def row(prompt: str | tuple[Message, ...], number: int = 0) -> Row:
    return Row("q.jsonl", number, prompt, "nq", ("a",))


@pytest.mark.parametrize("name", WHOLE)
def test_a_template_may_write_the_system_message_in_its_own_way(name: str) -> None:
    """Trimmed, before the user's text, or changed: it is there."""
    text = render(row(MESSAGES), build(WHOLE[name])).text
    assert "query" in text and ASKED in text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_template_that_leaves_out_a_message_is_refused(role: str) -> None:
    """The instruction about the tags may be in it; without a text there is nothing to lose."""
    tokenizer = build(NO_SYSTEM)
    with pytest.raises(DataError, match=rf"^q\.jsonl#7: got a message of the role {role}"):
        render(row(({"role": role, "content": SYSTEM}, MESSAGES[1]), 7), tokenizer)
    empty = {"role": role, "content": " "}
    assert render(row((empty, MESSAGES[1])), tokenizer).text == f"[{ASKED}]"


def test_what_a_template_rewrites_may_be_missing() -> None:
    """Thoughts of earlier turns are left out by many, and results of tools are JSON in some."""
    shown = (MESSAGES[1], {"role": "assistant", "content": "<think>x</think>"}, MESSAGES[1])
    assert render(row(shown), build(NO_SYSTEM)).text == f"[{ASKED}]" * 2


def test_keys_that_parquet_fills_with_null_are_no_keys(tmp_path: Path) -> None:
    """One row with a call gives all messages of the file the key, which templates ask for."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    truth = {"ground_truth": {"target": ["x"]}}
    prompts = [[MESSAGES[1]], [MESSAGES[1], call, {"role": "tool", "content": "r"}]]
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
        [{"data_source": "d", "prompt": p, "reward_model": truth} for p in prompts]
    ), path)  # fmt: skip
    rows = load_rows(str(path))
    assert [render(r, build(LLAMA_ASKS)).text for r in rows] == ["<Who?>", "<Who?>()<r>"]


def test_the_content_of_a_call_stays_even_if_it_is_null() -> None:
    """Templates read it without asking whether it is there."""
    template = "{{ messages[0].content }}{{ 'content' in messages[1] }}"
    call: Any = {"role": "assistant", "content": None, "tool_calls": [{}], "name": None}
    assert render(row((MESSAGES[1], call)), build(template)).text == "Who?True"


@pytest.mark.parametrize(
    "expression",
    ["none | length", "1 // 0", "messages[0].content + 1", "messages[0].content.format()[9]"],
)
def test_an_error_of_a_template_names_the_row(expression: str, tmp_path: Path) -> None:
    """Also one of Python, in a run and among the bad rows of a validation."""
    tokenizer = build(f"{{{{ {expression} }}}}")
    with pytest.raises(DataError, match=r"^q\.jsonl#3: got .*user"):
        render(row((MESSAGES[1],), 3), tokenizer)
    record = {"data_source": "d", "prompt": [MESSAGES[1]], "reward_model": {"ground_truth": "x"}}
    (tmp_path / "q.jsonl").write_text(json.dumps(record))
    assert validate([str(tmp_path / "q.jsonl")], tokenizer).num_bad == 1


@pytest.mark.parametrize("special", [f"$A {EOS}", f"{BOS} $A {EOS}", f"{BOS} $A", "$A"])
@pytest.mark.parametrize("text", ["Who?", f"Who?{EOS}", f"{EOS}Who?\n", f"a{EOS}{EOS} ", EOS])
def test_line_30_no_eos_is_added_to_a_prompt(text: str, special: str) -> None:
    """One that the tokenizer appends would end the text that is to be continued."""
    encode = functools.partial(build().encode, add_special_tokens=False)
    expected = tuple(encode(BOS + text if BOS in special else text))
    assert render(row(text), build(None, special)).ids == expected
    assert render(row(({"role": "user", "content": text},)), build(None, special)).ids == expected
