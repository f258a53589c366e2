"""Contexts of the transformers engine that are continued together, one token each at a time.

A row of the batch is a context; shorter rows are padded on the left. A new context is computed
once and joins the rows, one that has ended leaves them. Not every family gives a padded row its
own log-probs, and some caches cannot be padded: `Together.judge` measures it with the model itself.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from verl.ext.engines.context_cache import (
    CACHE_ERRORS,
    argument,
    difference,
    probe_ids,
    sequence_rows,
)

logger = logging.getLogger(__name__)

STARTS = {"first": (0, 3), "short": (0, 7), "long": (0, 15), "late": (2, 9)}
"""Contexts of `judge`: the step in which each joins, and its tokens then."""
NUM_STEPS, LEAVES = 5, {"long": 3}
"""Steps of `judge`, and after which step a context leaves."""


class Together:
    """The keys and values of several contexts, a row each, padded on the left."""

    def __init__(self, fits: bool = True, max_bytes: int = sys.maxsize) -> None:
        """Without `judge`, `fits` says whether a model's contexts can be continued together.

        `max_bytes`: of keys and values, which `admitted` keeps to.
        """
        self.fits, self._max_bytes = fits, max_bytes
        self._token_bytes = 0
        """Bytes of a token's keys and values; 0 until `judge` has measured them."""
        self.reset()

    def reset(self) -> None:
        """Drop all rows."""
        self._cache: DynamicCache | None = None
        self._lengths = dict[Any, int]()

    def __contains__(self, key: object) -> bool:
        return key in self._lengths

    def admitted(self, longest: Sequence[int]) -> int:
        """Return how many contexts, from the first on, have room together; at least one.

        `longest`: the tokens that each may have at its end. All rows are as wide as the widest.
        """
        widths = itertools.accumulate(longest, max)
        sizes = (rows * width * self._token_bytes for rows, width in enumerate(widths, 1))
        return max(1, sum(size <= self._max_bytes for size in sizes))

    @torch.inference_mode()
    def logits(self, model: Any, contexts: Mapping[Any, Sequence[int]]) -> Tensor:
        """Return (num_contexts, vocab_size) float32 logits after each context, in their order.

        A context that is one token longer than its row continues it; any other begins a row. Rows
        without a context are dropped.
        """
        cache, lengths = self._cache, self._lengths
        self.reset()  # a forward pass that fails would leave it filled in some layers only
        going = [key for key in lengths if len(contexts.get(key, ())) == lengths[key] + 1]
        staying = set(going)
        new = [key for key in contexts if key not in staying]
        parts = list[Tensor]()
        if cache is not None and going:
            if len(going) < len(lengths):
                rows = {key: row for row, key in enumerate(lengths)}
                _keep(cache, [rows[key] for key in going], max(lengths[key] for key in going))
            parts.append(_forward(model, cache, [contexts[key] for key in going], 1))
        else:
            cache = None
        if new:
            added = DynamicCache(config=model.config)
            width = max(len(contexts[key]) for key in new)
            parts.append(_forward(model, added, [contexts[key] for key in new], width))
            cache = added if cache is None else _join(cache, added)
        order = [*going, *new]
        self._cache, self._lengths = cache, {key: len(contexts[key]) for key in order}
        place = {key: row for row, key in enumerate(order)}
        return torch.cat(parts)[[place[key] for key in contexts]]

    def judge(self, model: Any, tokenizer: Any, path: str, tolerance: float) -> None:
        """Measure on short texts whether padded rows have their own log-probs, and set `fits`.

        `tolerance`: smallest mean difference in nats that is more than rounding.
        """
        ids = probe_ids(tokenizer)
        texts = {key: ids[n:] + ids[:n] for n, key in enumerate(STARTS)}
        problem = ""
        try:
            expected = {key: sequence_rows(model, text) for key, text in texts.items()}
            for step in range(NUM_STEPS):
                lengths = {key: length + step - joins for key, (joins, length) in STARTS.items()
                           if joins <= step < LEAVES.get(key, NUM_STEPS)}  # fmt: skip
                contexts = {key: texts[key][:length] for key, length in lengths.items()}
                found = self.logits(model, contexts).log_softmax(-1)
                self._token_bytes = self._measured_bytes()
                own = [expected[key][length - 1] for key, length in lengths.items()]
                apart = [difference(*pair) for pair in zip(found, own, strict=True)]
                if not all(x <= tolerance for x in apart):
                    problem = f"log-probs of padded rows differ by {max(apart):.2g} nats"
                    break
        except CACHE_ERRORS as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        self.reset()
        self.fits = not problem
        if problem:
            logger.warning("%s: requests are served one after another (%s)", path, problem)

    def _measured_bytes(self) -> int:
        """Return the bytes of a token's keys and values in the rows that there are."""
        assert self._cache is not None, "called when there are rows"
        states = [x for layer in layers(self._cache) for x in (layer.keys, layer.values)]
        return sum(x.nbytes // (x.shape[0] * x.shape[-2]) for x in states)


def _forward(
    model: Any, cache: DynamicCache, contexts: Sequence[Sequence[int]], num_new: int
) -> Tensor:
    """Return (num_contexts, vocab_size) logits; the last `num_new` tokens are not in the cache."""
    lengths = torch.tensor([len(context) for context in contexts])
    width = cache.get_seq_length() + num_new
    positions = torch.arange(width) - (width - lengths)[:, None]
    ids = [[0] * (num_new - len(context)) + list(context[-num_new:]) for context in contexts]
    arguments: dict[str, Any] = {
        "attention_mask": (positions >= 0).long().to(model.device),
        "past_key_values": cache, "use_cache": True,
    }  # fmt: skip
    if argument(model, "position_ids"):
        arguments["position_ids"] = positions[:, -num_new:].clamp(min=0).to(model.device)
    if argument(model, "logits_to_keep"):
        arguments["logits_to_keep"] = 1
    output = model(torch.tensor(ids, device=model.device), **arguments)
    layers(cache)  # refuses states of other kinds, of which rows cannot be padded
    last: Tensor = output.logits[:, -1].float().cpu()
    return last


def layers(cache: DynamicCache) -> list[Any]:
    """Return the keys and values of each layer. Raises TypeError if a layer has other states."""
    found: list[Any] = cache.layers
    if other := next((x for x in found if type(x) is not DynamicLayer), None):
        raise TypeError(f"got a cache of {type(other).__name__}, expected keys and values only")
    return found


def _keep(cache: DynamicCache, rows: list[int], width: int) -> None:
    """Drop the other rows, and the columns in which all that stay are padded."""
    for layer in layers(cache):
        layer.keys = layer.keys[rows, :, -width:]
        layer.values = layer.values[rows, :, -width:]


def _join(cache: DynamicCache, added: DynamicCache) -> DynamicCache:
    """Return the rows of `cache` followed by those of `added`."""
    width = max(cache.get_seq_length(), added.get_seq_length())
    for layer, more in zip(layers(cache), layers(added), strict=True):
        layer.keys = torch.cat([_padded(layer.keys, width), _padded(more.keys, width)])
        layer.values = torch.cat([_padded(layer.values, width), _padded(more.values, width)])
    return cache


def _padded(states: Tensor, width: int) -> Tensor:
    """Return (rows, heads, width, size) keys or values, padded on the left."""
    return pad(states, (0, 0, width - states.shape[-2], 0))
