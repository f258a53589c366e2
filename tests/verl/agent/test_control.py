"""No text from outside becomes a control token, in the layouts of several families."""

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.agent.grammar import SEARCH_R1
from tests.verl.agent.chat_templates import ChatTokenizer
from verl.agent.control import break_strings, control_strings
from verl.agent.interface import Item, ToolCall, Turn
from verl.agent.native import NativeFormat
from verl.agent.tags import neutralize

LAYOUTS = {
    "qwen": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<tool_call>", "<think>")),
    "mistral": (("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ()),
    "deepseek": (("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
                 ("<｜tool▁calls▁begin｜>",)),
    "gemma": (("<bos>", "<start_of_image>"), ("<unused0>", "<unused1>", "[multimodal]", "  ")),
    "bert": (("[CLS]", "[SEP]", "[MASK]"), ("[unused1]",)),
    "spaces": (("[X]", "[ X]", "[  X]"), ("<a b>", "< a b>")),
    "word": (("END",), ("protein", "1994", "\n\n", "    ")),
}  # fmt: skip
"""Special and other added tokens by family."""


@functools.cache
def build(layout: str, byte_fallback: bool) -> Any:
    """Return a fast tokenizer of bytes, or of SentencePiece's form, with the layout's tokens."""
    if byte_fallback:
        vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
        core = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        core.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    special, other = LAYOUTS[layout]
    core.add_special_tokens([AddedToken(t, special=True, lstrip=i % 2 == 0, rstrip=i % 3 == 0)
                             for i, t in enumerate(special)])  # fmt: skip
    core.add_tokens([AddedToken(t, normalized=i % 2 == 0) for i, t in enumerate(other)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[-1])


def controls(tokenizer: Any) -> set[int]:
    plain = {"protein", "1994", "\n\n", "    ", "  "}
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.content not in plain}


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_line_32_no_text_makes_a_control_token(
    layout: str, byte_fallback: bool, data: st.DataObject
) -> None:
    """Whole tokens, their parts, and parts within each other give no control id."""
    tokenizer = build(layout, byte_fallback)
    tokens = [token for group in LAYOUTS[layout] for token in group]
    parts = [*tokens, *(t[:n] for t in tokens for n in (1, 2, -1)), *(t[-2:] for t in tokens),
             " ", "▁", "x", "［", "］", "＜"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    for safe in (
        break_strings(text, control_strings(tokenizer)),
        neutralize(text, SEARCH_R1, control_strings(tokenizer)),
    ):
        assert not controls(tokenizer).intersection(tokenizer.encode(safe))


def test_line_32_results_in_native_dialogues_have_no_control_tokens() -> None:
    """The messages of tools are neutralised as documents of tag dialogues are."""
    format, turn = NativeFormat(ChatTokenizer(), ()), Turn((ToolCall("capital", {}),))
    reserved = control_strings(build("mistral", False))
    assert "[INST]" not in format.respond(turn, [[Item("a [INST] b")]], reserved)


def test_ordinary_added_tokens_are_left_alone() -> None:
    """White space, words and numbers are not changed, unless they are special."""
    strings = control_strings(build("word", False))
    assert strings == ("END",)
    assert break_strings("1994 protein\n\n    x", strings) == "1994 protein\n\n    x"
