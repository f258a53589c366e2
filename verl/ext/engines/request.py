"""A request of the transformers engine: samples from logits, a token at a time, until it ends."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.rollout.stops import cut_at_stop
from verl.types import Completion, Sampling

REPLACEMENT = "\ufffd"
"""Character that the tokenizer returns for the first bytes of an incomplete character."""


@dataclass(eq=False)
class Request:
    """What was asked for, and what was sampled so far."""

    context: list[int]
    """The prompt, followed by the sampled ids."""
    sampling: Sampling
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    """Why it has ended, or None."""
    _num_reported: int = 0

    @property
    def longest(self) -> int:
        """Tokens that the context may have at its end."""
        return len(self.context) - len(self.ids) + self.sampling.max_tokens

    def take(self, logits: Tensor, tokenizer: Any, end_ids: Set[int]) -> None:
        """Sample the next id from (vocab_size,) logits."""
        log_probs = processed_log_probs(logits, self.sampling)
        if self.sampling.temperature == 0:
            token = int(log_probs.argmax())
        else:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        self.ids.append(token)
        self.context.append(token)
        self.log_probs.append(float(log_probs[token]))
        self.text, is_stopped = cut_at_stop(tokenizer.decode(self.ids), self.sampling.stop)
        if is_stopped or token in end_ids:
            self.reason = "stop"
        elif len(self.ids) == self.sampling.max_tokens:
            self.reason = "length"

    def new_text(self) -> str:
        """Return what was added to the text since the last call, up to the last whole character."""
        if self.text.endswith(REPLACEMENT):
            return ""
        new = self.text[self._num_reported :]
        self._num_reported = len(self.text)
        return new

    def completion(self, version: int) -> Completion:
        """Return the result, sampled with weights of `version`. Only once it has ended."""
        assert self.reason is not None
        return Completion(tuple(self.ids), tuple(self.log_probs), self.text, self.reason, version)


def processed_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return (vocab_size,) log-probs of the sampled distribution: after temperature and top-p."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    log_probs = logits.log_softmax(-1)
    if sampling.temperature == 0 or sampling.top_p >= 1:
        return log_probs
    ordered, order = log_probs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    outside = order[before >= sampling.top_p]
    return log_probs.index_fill(0, outside, -torch.inf).log_softmax(-1)
