"""A prompt has one BOS, also if its text was rendered before."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.data.prompts import render
from verl.data.rows import Message, Row


def build(bos: str, template: str | None = None) -> Any:
    """Return a tokenizer that adds a BOS of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens([bos])
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, chat_template=template)


@pytest.mark.parametrize("bos", ["<|begin_of_text|>", "<bos>", "<s>"])
def test_line_30_a_prompt_that_was_rendered_before_has_one_bos(bos: str) -> None:
    """The tokenizer's BOS, the text's and the template's are one."""
    template = bos * 2 + "{{ messages[0].content }}"
    message: tuple[Message, ...] = ({"role": "user", "content": "Who?"},)
    prompts: tuple[tuple[Any, Any], ...] = (
        (build(bos), "Who?"), (build(bos), bos + "Who?"), (build(bos), message),
        (build(bos, template), message),
    )  # fmt: skip
    expected = tuple(build(bos).encode(bos + "Who?", add_special_tokens=False))
    for tokenizer, prompt in prompts:
        assert render(Row("f", 0, prompt, "nq", ("a",)), tokenizer).ids == expected


@pytest.mark.parametrize("head", [" ", "\n\n", "\ufeff", "\t \u200b"])
@pytest.mark.parametrize("bos", ["<|begin_of_text|>", "<bos>", "<s>"])
def test_line_30_white_space_before_a_rendered_bos_is_no_text(bos: str, head: str) -> None:
    """Neither before the first BOS nor between two of them; white space after it is text."""
    tokenizer = build(bos)
    expected = tuple(tokenizer.encode(bos + " Who?", add_special_tokens=False))
    for prompt in (f"{head}{bos} Who?", f"{head}{bos}{head}{bos} Who?"):
        assert render(Row("f", 0, prompt, "nq", ("a",)), tokenizer).ids == expected
    plain = render(Row("f", 0, f"{head}Who {bos}", "nq", ("a",)), tokenizer).text
    assert plain == f"{head}Who {bos}"
