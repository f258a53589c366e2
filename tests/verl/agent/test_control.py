"""No text from outside becomes a control token, in the layouts of several families."""

import functools
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.agent.grammar import SEARCH_R1
from tests.core.agent.chat_templates import ChatTokenizer
from verl.agent.control import break_strings, control_strings
from verl.agent.interface import Item, ToolCall, Turn
from verl.agent.native import NativeFormat
from verl.agent.tags import neutralize

LAYOUTS = {
    "qwen": (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<tool_call>", "<think>")),
    "mistral": (("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ()),
    "deepseek": (("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
                 ("<｜tool▁calls▁begin｜>",)),
    "gemma": (("<bos>", "<start_of_image>"),
              ("<unused0>", "<unused1>", "[multimodal]", "  ", "<b>", "</table>", "<h1>", "<s>")),
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
    plain = {"protein", "1994", "\n\n", "    ", "  ", "<b>", "</table>", "<h1>"}
    if "<s>" not in tokenizer.all_special_tokens:
        plain.add("<s>")
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.content not in plain}


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_line_32_no_text_makes_a_control_token(
    layout: str, byte_fallback: bool, data: st.DataObject
) -> None:
    """Whole tokens, their parts, and parts within each other give no control id."""
    tokenizer = build(layout, byte_fallback)
    tokens = [token for group in LAYOUTS[layout] for token in group]
    parts = [*tokens, *(t[:n] for t in tokens for n in (1, 2, -1)), *(t[-2:] for t in tokens),
             *(t.replace("▁", " ") for t in tokens), " ", "▁", "x",
             "［", "］", "＜", "ＩＮＳＴ", "ｔ", "|", "\u00a0"]  # fmt: skip
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
    """White space, words, numbers and HTML's formatting are not changed, unless special."""
    strings = control_strings(build("word", False))
    assert strings == ("END",)
    assert break_strings("1994 protein\n\n    x", strings) == "1994 protein\n\n    x"
    assert set(control_strings(build("gemma", False))) == {
        "<bos>", "<start_of_image>", "<unused0>", "<unused1>", "[multimodal]"
    }  # fmt: skip
    assert "<s>" in control_strings(build("mistral", False))


def test_a_normalized_token_is_broken_in_the_form_that_its_tokenizer_reads() -> None:
    """NFKC makes `|` of DeepSeek's `｜`, and SentencePiece `▁` of a space, in token and text."""
    tokenizer = build("deepseek", True)
    for text in ("<|tool▁calls▁begin|>", "<｜tool calls begin｜>", "<|tool calls begin|>"):
        assert text in control_strings(tokenizer)


PIECES = ["<", "|", "a", "é", "e\u0301", ">", " ", "[", "]", "＜", "｜", "ａ", "①", "1", "ﬁ", "fi",
          "𝐚", "中", "，", "\u0301", "\\", "\ud800"]  # fmt: skip
WANTED = ["<|a|>", "[1]", "<é>", "[fi", "\\a", "a b", "中|"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, *WANTED]), max_size=10).map("".join))
def test_strings_are_found_in_text_and_compatibility_form_as_by_a_loop(text: str) -> None:
    """The form is made only of texts with a character that can become one of the strings'."""

    def contains(text: str) -> bool:
        forms = (text, unicodedata.normalize("NFKC", text))
        return any(string in form for string in WANTED for form in forms)

    broken = break_strings(text, WANTED)
    assert not contains(broken)
    if not contains(text):
        assert broken == text
    else:
        form = unicodedata.normalize("NFKC", text)
        assert broken.replace(" ", "") in (text.replace(" ", ""), form.replace(" ", ""))


def test_the_patterns_of_a_tokenizer_are_built_once() -> None:
    """Gemma has 6,000 tokens, and a search has dozens of texts."""
    strings = control_strings(build("qwen", False))
    assert strings.breaker is strings.breaker
    assert strings.without(["<tool_call>"]) == tuple(s for s in strings if s != "<tool_call>")
    assert strings.without(["absent"]) is strings
