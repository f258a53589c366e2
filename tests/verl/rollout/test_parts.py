"""A turn that is cut, wherever, is the turn that was not cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from transformers import PreTrainedTokenizerBase

from example.model import load_tokenizer
from verl.rollout.interface import INTERRUPTED
from verl.rollout.parts import Parts, begins_stop
from verl.types import Completion, Sampling

PROMPT = (5, 6, 7)
STOP = ("</search>", "</answer>")
TEXTS = [
    "I </s look <search>who</search>",
    "Ünï🙂日本</search>",
    "it is < b </answer",
    "<answer>a</search",
]  # fmt: skip
"""The last two end with the end of the sequence, in the middle of a tag."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Tags, and letters of other scripts, are several tokens in it."""
    return load_tokenizer()


@dataclass
class Typist:
    """Says its ids one by one, whatever it is asked; looks for stop strings in what it says itself,
    as engines do. New weights interrupt it where so many of the ids were said."""

    tokenizer: PreTrainedTokenizerBase
    ids: Sequence[int]
    cuts: list[int]
    version: int = 0
    seeds: list[int | None] = field(default_factory=list)
    """Of the requests that gave tokens."""

    async def ask(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        begin = len(ids) - len(PROMPT)
        assert tuple(ids) == (*PROMPT, *self.ids[:begin])
        said = await self._say(begin, sampling)
        self.seeds += [sampling.seed] if said.ids else []
        return said

    async def _say(self, begin: int, sampling: Sampling) -> Completion:
        for end in range(begin, len(self.ids) + 1):
            text = self.tokenizer.decode(self.ids[begin:end])
            if end == len(self.ids) or any(tag in text for tag in sampling.stop):
                return self._said(begin, end, text, "stop")
            if end - begin == sampling.max_tokens:
                return self._said(begin, end, text, "length")
            if end in self.cuts:
                self.cuts.remove(end)
                said = self._said(begin, end, text, INTERRUPTED)
                self.version += 1
                return said
        raise AssertionError("it always ends")

    def _said(self, begin: int, end: int, text: str, reason: str) -> Completion:
        log_probs = tuple(-float(place) for place in range(begin, end))
        return Completion(tuple(self.ids[begin:end]), log_probs, text, reason, self.version)


def play(typist: Typist, most: int = 100, untils: Sequence[int] = ()) -> Completion:
    """The whole turn; `untils` are the cuts that a schedule repeats."""

    async def turn() -> Completion:
        parts = Parts(PROMPT, Sampling(most, stop=STOP, seed=3), typist.tokenizer.decode)
        for until in (*untils, *([None] * 9)):
            if whole := await parts.go_on(typist.ask, until):
                return whole
            typist.version += until is not None
        raise AssertionError("nothing is cut so often")

    return asyncio.run(turn())


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_turn_is_the_whole_one_wherever_it_is_cut(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    """Once or twice, before the first token too: ids, text and ending are those without cuts, also
    within a stop string or a letter, each log-prob and version that of its token."""
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    for most in (len(ids) // 2, 100):
        whole = play(Typist(tokenizer, ids, []), most)
        for cuts in itertools.combinations(range(len(whole.ids)), 2):
            got = play(Typist(tokenizer, ids, list(cuts)), most)
            versions = tuple(sum(cut <= place for cut in cuts) for place in range(len(got.ids)))
            assert (got.ids, got.log_probs) == (whole.ids, whole.log_probs)
            assert got.finish_reason == whole.finish_reason
            assert got.text == whole.text
            assert got.weight_versions == (versions if len(set(versions)) > 1 else ())
            assert got.weight_version == versions[-1]


def test_each_part_has_a_seed_of_its_own_and_a_schedule_repeats_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The first part's seed would repeat its randomness; cut by the number of tokens, the turn asks
    for the same again."""
    ids = tokenizer.encode(TEXTS[0])
    for cuts in itertools.combinations(range(1, len(ids)), 2):
        cut, again = Typist(tokenizer, ids, list(cuts)), Typist(tokenizer, ids, [])
        assert play(cut) == play(again, untils=cuts)
        assert cut.seeds == again.seeds
        assert len(set(cut.seeds)) == len(cut.seeds) >= 3 and cut.seeds[0] == 3


def test_the_beginning_of_a_stop_string_is_seen_at_the_end_only() -> None:
    """A whole one is no beginning."""
    found = [begins_stop(text, STOP) for text in ("a <", "a </ans", "a </ans b", "</answer>", "")]
    assert found == [True, True, False, False, False]
