"""A turn that new weights may cut: what is asked for next, and what all its parts make.

Nothing that was sampled is dropped or sampled twice, and a stop string is found wherever a cut
falls: an engine looks for it in what it samples itself, so after a part that ends with the
beginning of one, tokens are asked for one by one until the text says whether it is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from verl.agent.dialogue import derived_seed
from verl.rollout.interface import INTERRUPTED
from verl.types import Completion, Sampling

Decode = Callable[[Sequence[int]], str]
Ask = Callable[[Sequence[int], Sampling], Awaitable[Completion]]
NUM_BEFORE = 16
"""Tokens before a turn that are decoded with it: some tokenizers drop a text's first space."""


@dataclass
class Parts:
    """One turn's request, and the parts that are there."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    decode: Decode
    """Text of ids; asked only where a turn is cut."""
    said: list[Completion] = field(default_factory=list)
    _text: str = ""

    @property
    def num_tokens(self) -> int:
        """How many were sampled so far."""
        return sum(len(one.ids) for one in self.said)

    async def go_on(self, ask: Ask, until: int | None = None) -> Completion | None:
        """Sample by weights that stay the same until the turn is whole, which is then returned,
        interrupted, or `until` tokens long."""
        most = self.sampling.max_tokens
        until = most if until is None else min(until, most)
        while True:
            new = await ask(*self._request(until))
            if not self.said and until == most and new.finish_reason != INTERRUPTED:
                return new
            if new.ids:
                self.said.append(new)
            whole = self._whole(new.finish_reason)
            if whole or new.finish_reason == INTERRUPTED or self.num_tokens >= until:
                return whole

    def _request(self, until: int) -> tuple[Sequence[int], Sampling]:
        """For what is missing to `until` tokens of the turn.

        A later part has a seed of its own: with the first one's it would repeat its randomness.
        """
        num, sampling = self.num_tokens, self.sampling
        if not num:
            return self.prompt_ids, replace(sampling, max_tokens=until)
        most = 1 if begins_stop(self._text, sampling.stop) else until - num
        seed = None if sampling.seed is None else derived_seed(sampling.seed, num)
        ids = [*self.prompt_ids, *(i for one in self.said for i in one.ids)]
        return ids, replace(sampling, max_tokens=most, seed=seed)

    def _whole(self, finish_reason: str) -> Completion | None:
        """All parts in one, if the last, which ended for this reason, also ends the turn."""
        ids = tuple(i for one in self.said for i in one.ids)
        before = list(self.prompt_ids[-NUM_BEFORE:])
        text = self.decode([*before, *ids])[len(self.decode(before)) :]
        self._text, is_stopped = cut_at_stop(text, self.sampling.stop)
        if not is_stopped and finish_reason != "stop" and len(ids) < self.sampling.max_tokens:
            return None
        reason = "stop" if is_stopped or finish_reason == "stop" else "length"
        log_probs = tuple(p for one in self.said for p in one.log_probs)
        versions = tuple(one.weight_version for one in self.said for _ in one.ids)
        several = versions if len(set(versions)) > 1 else ()
        return Completion(ids, log_probs, self._text, reason, versions[-1], several)


def begins_stop(text: str, stop: Sequence[str]) -> bool:
    """Whether `text` ends with the beginning of a stop string, which may go on after it."""
    return any(text.endswith(tag[:n]) for tag in stop for n in range(1, len(tag)))


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the end of the stop string that ends first, and whether there is one."""
    ends = [text.index(tag) + len(tag) for tag in stop if tag in text]
    return (text[: min(ends)], True) if ends else (text, False)
