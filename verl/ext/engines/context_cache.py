"""The cache of the transformers engine: logits after a context, of which a model computes little.

What the caches of transformers may be used for differs between families: attention can be continued
by any number of tokens, some recurrent layers only by one at a time, and some families ignore their
cache without an error. `ContextCache.judge` measures it with the model itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from verl.errors import ModelError, explain
from verl.model_files import SAMPLE

logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the cache among the arguments of a model's forward pass."""
NUM_PROBED = 24
"""Tokens of the text by which a cache is judged."""
FIRST, STEPS, LATER = 9, (1, 1, 1), (6, 1, 5)
"""Tokens of its parts: those of the first turn, then of sampling, then of later turns."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Smallest mean difference, in nats, that is more than rounding."""
HALF_TOLERANCE = 0.1
"""The same for dtypes of 16 bits."""
NOISE_FACTOR = 8.0
"""A difference this many times the rounding that was measured is more than rounding."""
CACHE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What models raise for a cache that they cannot use."""


class Reuse(Enum):
    """What a model's cache may be used for."""

    ANY = "any continuation"
    STEP = "one more token"
    NONE = "nothing"


class ContextCache:
    """The keys, values and states of the last context that a model was given."""

    def __init__(self, reuse: Reuse = Reuse.ANY) -> None:
        """Without `judge`, `reuse` says what the cache may be used for."""
        self.reuse = reuse
        self.reset()

    def reset(self) -> None:
        """Drop the cached context, for another dialogue or other weights."""
        self._cache: DynamicCache | None = None
        self._ids = list[int]()

    @torch.inference_mode()
    def logits(self, model: Any, context: Sequence[int]) -> Tensor:
        """Return (vocab_size,) float32 logits after `context`; computes only uncached tokens."""
        num_cached, num_new = len(self._ids), len(context) - len(self._ids)
        may_continue = num_new == 1 or (num_new > 1 and self.reuse is Reuse.ANY)
        if not may_continue or list(context[:num_cached]) != self._ids:
            self.reset()  # another dialogue, or the same one again
            num_cached = 0
        new_ids = torch.tensor([context[num_cached:]], device=model.device)
        arguments: dict[str, Any] = {"use_cache": False}
        cache = self._cache
        name = None if self.reuse is Reuse.NONE else argument(model, *CACHE_NAMES)
        if name is not None:
            cache = DynamicCache(config=model.config) if cache is None else cache
            arguments = {"use_cache": True, name: cache}
        if argument(model, "logits_to_keep"):
            arguments["logits_to_keep"] = 1
        self.reset()  # a forward pass that fails would leave it filled in some layers only
        output = model(new_ids, **arguments)
        if name is not None:
            self._cache, self._ids = cache, list(context)
        last: Tensor = output.logits[0, -1].float().cpu()
        return last

    def judge(self, model: Any, tokenizer: Any, path: str) -> float:
        """Measure on a short text what `model` may use its cache for, and set `reuse`.

        The log-probs after each part of the text are compared with those of a forward pass without
        a cache. Returns the smallest mean difference in nats that is more than rounding. Raises
        ModelError if the log-probs depend on the text that follows them.
        """
        ids = probe_ids(tokenizer)
        ends = [sum((FIRST, *STEPS, *LATER)[:n]) for n in range(1, 2 + len(STEPS) + len(LATER))]
        rows = sequence_rows(model, ids)
        noise = difference(sequence_rows(model, ids[: NUM_PROBED // 2])[-1],
                           rows[NUM_PROBED // 2 - 1])  # fmt: skip
        smallest = TOLERANCE.get(model.dtype, HALF_TOLERANCE)
        if not noise <= 10 * smallest:
            got = f"{path} (log-probs that change by {noise:.2g} nats with the text that follows)"
            expected, fix = "a causal language model", "give the decoder of this family"
            raise ModelError(explain("model path", got, expected, fix))
        tolerance = max(smallest, NOISE_FACTOR * noise)
        self.reuse, num_right, problem = Reuse.ANY, 0, ""
        try:
            for end in ends:
                log_probs = self.logits(model, ids[:end]).log_softmax(-1)
                apart = difference(log_probs, rows[end - 1])
                if not apart <= tolerance:
                    problem = f"log-probs differ by {apart:.2g} nats"
                    break
                num_right += 1
        except CACHE_ERRORS as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        self.reset()
        if problem:
            self.reuse = Reuse.STEP if num_right > len(STEPS) else Reuse.NONE
            logger.warning("%s: its cache is used for %s, which is slower (with more: %s)",
                           path, self.reuse.value, problem)  # fmt: skip
        return tolerance


def probe_ids(tokenizer: Any) -> list[int]:
    """Return the `NUM_PROBED` ids of the text by which a cache is judged."""
    ids: list[int] = tokenizer.encode(SAMPLE, add_special_tokens=False)
    return (ids * NUM_PROBED)[:NUM_PROBED]


@torch.inference_mode()
def sequence_log_probs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-prob of each id after the first, computed without a cache."""
    rows = sequence_rows(model, ids)[:-1]
    chosen: list[float] = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return chosen


def argument(model: Any, *names: str) -> str | None:
    """Return the first of `names` that is an argument of the model's forward pass."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in names if name in parameters), None)


@torch.inference_mode()
def sequence_rows(model: Any, ids: list[int]) -> Tensor:
    """Return (num_tokens, vocab_size) log-probs after each token, without a cache."""
    output = model(torch.tensor([ids], device=model.device), use_cache=False)
    log_probs: Tensor = output.logits[0].float().cpu().log_softmax(-1)
    return log_probs


def difference(log_probs: Tensor, expected: Tensor) -> float:
    """Return the mean difference of the log-prob of a token that `expected` samples, in nats."""
    return float((expected.exp() * (log_probs - expected).abs()).sum())
