"""Long results are cut as if they were encoded as a whole, at a small part of the cost."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.fakes import ByteTokenizer
from verl.agent.dialogue import DialogueAgent, Limits, Results, count_tokens
from verl.agent.environment import Environment
from verl.agent.interface import Item, Turn
from verl.agent.tags import plain_format

PROSE = "The river Danube runs through ten countries; Vienna, Budapest and Belgrade lie on it. "


class Trained:
    """A tokenizer of any kind, trained on a little prose."""

    all_special_tokens = ("<|im_end|>",)

    def __init__(self, model: Any, trainer: Any, split: Any, normalizer: Any = None) -> None:
        self._inner = Tokenizer(model)
        self._inner.pre_tokenizer = split
        if normalizer is not None:
            self._inner.normalizer = normalizer
        self._inner.train_from_iterator(
            [PROSE + "unbelievable internationalization  \n" * 3], trainer
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


KINDS: dict[str, Callable[[], Any]] = {
    "bytes": ByteTokenizer,
    "byte-level pairs": lambda: Trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=400, show_progress=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "pairs with spaces": lambda: Trained(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False),
        pre_tokenizers.Metaspace(),
    ),
    "unigram": lambda: Trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
    "word pieces": lambda: Trained(
        models.WordPiece(unk_token="<unk>", max_input_chars_per_word=100),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
}


@functools.cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


class Whole(DialogueAgent):
    """The oracle: encodes every response as a whole, however long."""

    def _fits(self, turn: Turn, results: Results) -> bool:
        return (
            count_tokens(self.tokenizer, self._response_text(turn, results))
            <= self.limits.max_obs_length
        )


def fitted(
    agent_type: type[DialogueAgent], tokenizer: Any, limit: int, results: Results
) -> Results:
    format = replace(plain_format(()), invalid_action="Again.")
    agent = agent_type(Limits(max_obs_length=limit), format, Environment(), tokenizer)
    return agent.fit(Turn(), results)


WORDS = ["a", "Danube", "internationalization", "", " ", "   ", "\n", "\t\n", "河", "河流" * 30,
         "x" * 90, "y" * 150, "😀", "é", "e\u0301", "ﬁ", "<answer>", "</information>", "<|im_end|>",
         "<eos>", "123456789", "...", "-", "\u200b", "\xa0", "𐍈"]  # fmt: skip
TEXTS = st.builds(
    lambda words, times, gap: gap.join(words * times),
    st.lists(st.sampled_from(WORDS) | st.text(max_size=9).filter(str.isprintable), max_size=12),
    st.sampled_from([1, 1, 5, 40, 200]),
    st.sampled_from([" ", " ", "", "  ", "\n"]),
)
ITEMS = st.builds(Item, TEXTS, st.none() | st.text(max_size=9).filter(str.isprintable) | TEXTS)
RESULTS = st.lists(st.lists(ITEMS, max_size=4), min_size=1, max_size=2)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=list(HealthCheck))
@given(results=RESULTS, limit=st.sampled_from([40, 60, 90, 200]))
@example(results=[[Item("x " + " " * 20_000 + "y")]], limit=60)
@example(results=[[Item(PROSE * 300, "Danube"), Item(PROSE)]], limit=200)
@example(results=[[Item("z" * 30_000, "t" * 30_000)]], limit=90)
@example(results=[[Item(" " * 30_000 + PROSE)], [Item("\n" * 5000)]], limit=90)
def test_results_are_cut_as_if_they_were_encoded_as_a_whole(
    kind: str, results: list[list[Item]], limit: int
) -> None:
    """For every kind of tokenizer, with long runs of spaces and very long words."""
    limit = 4 * limit if kind == "bytes" else limit
    expected = fitted(Whole, tokenizer(kind), limit, results)
    assert fitted(DialogueAgent, tokenizer(kind), limit, results) == expected


class Counting:
    """A word tokenizer that counts the characters that it encodes."""

    all_special_tokens: Sequence[str] = ()
    num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        return [0] * len(text.split())


@pytest.mark.parametrize("num_items", [1, 100])
def test_a_long_document_is_not_encoded_as_a_whole(num_items: int) -> None:
    """Of half a megabyte per item only a few times the budget is encoded, which is fast."""
    counting, results = Counting(), [[Item(PROSE * 6000, "Danube")] * num_items]
    start = time.thread_time()
    (kept,) = fitted(DialogueAgent, counting, 500, results)
    assert len(kept) == 1 and 450 <= len(kept[0].text.split()) <= 500
    assert counting.num_chars < 200 * 16 * 500
    assert time.thread_time() - start < 2
