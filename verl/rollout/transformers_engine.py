"""A small engine over transformers for one dialogue at a time: starts at once, streams tokens.

It keeps the key-value cache of the last context, so that the next turn only reads what is new.
For training and evaluation use the vLLM engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verl.errors import ModelError, explain
from verl.types import Completion, Sampling

Listener = Callable[[str], None]
"""Hears new text of a completion."""
REPLACEMENT = "\ufffd"
"""What decoding shows for the first bytes of an unfinished character."""


@dataclass
class TransformersEngine:
    """An `Engine` over one transformers model; requests wait for each other."""

    model: Any
    tokenizer: Any
    _cache: DynamicCache = field(default_factory=DynamicCache, init=False)
    _cached_ids: list[int] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @classmethod
    def from_folder(cls, model: str, device: str, dtype: str) -> TransformersEngine:
        """Load model and tokenizer; raises ModelError when they are not there."""
        try:
            weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            is_folder = Path(model).is_dir()
            got = f"a folder transformers cannot load ({error})" if is_folder else "nothing there"
            raise ModelError(
                explain(f"model {model}", got, "a Hugging Face model", "make demo, or --model PATH")
            ) from error
        return cls(weights.eval().to(device), tokenizer)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids` in a thread, so that the event loop stays free."""
        return await self.stream(prompt_ids, sampling, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """As `generate`; in the event loop, `listener` hears new text as it is sampled.

        When the caller is cancelled, sampling ends with the token at hand.
        """
        loop = asyncio.get_running_loop()
        is_over = threading.Event()

        def hear(text: str) -> None:
            if not is_over.is_set():
                listener(text)

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(hear, text)

        try:
            return await asyncio.to_thread(
                self._generate, list(prompt_ids), sampling, tell, is_over.is_set
            )
        finally:
            is_over.set()

    def _generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        tell: Listener,
        is_over: Callable[[], bool],
    ) -> Completion:
        with self._lock:
            ids: list[int] = []
            log_probs: list[float] = []
            text, told, reason = "", 0, "length"
            for token, log_prob in self._samples(prompt_ids, sampling):
                ids.append(token)
                log_probs.append(log_prob)
                text, is_stopped = cut_at_stop(self.tokenizer.decode(ids), sampling.stop)
                if not text.endswith(REPLACEMENT):
                    tell(text[told:])
                    told = len(text)
                if is_stopped or token in self._end_ids():
                    reason = "stop"
                    break
                if len(ids) == sampling.max_tokens or is_over():
                    break
            return Completion(tuple(ids), tuple(log_probs), text, reason)

    def _samples(self, prompt_ids: list[int], sampling: Sampling) -> Iterator[tuple[int, float]]:
        """Sampled ids with their log-probs, without end."""
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        context = list(prompt_ids)
        while True:
            log_probs = processed_log_probs(self._logits(context), sampling)
            if sampling.temperature == 0:
                token = int(log_probs.argmax())
            else:
                token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            yield token, float(log_probs[token])
            context.append(token)

    @torch.inference_mode()
    def _logits(self, context: list[int]) -> Tensor:
        """(vocab_size,) float32 logits after `context`; only what the cache lacks is computed."""
        known = len(self._cached_ids)
        if known >= len(context) or context[:known] != self._cached_ids:
            known, self._cache = 0, DynamicCache()  # another dialogue, or the same one again
        new = torch.tensor([context[known:]], device=self.model.device)
        answer = self.model(new, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cached_ids = context.copy()
        logits: Tensor = answer.logits[0, -1].float().cpu()
        return logits

    def _end_ids(self) -> set[int]:
        """Every id that ends a sequence."""
        declared = self.model.generation_config.eos_token_id
        ends = declared if isinstance(declared, list) else [declared]
        return {i for i in (*ends, self.tokenizer.eos_token_id) if i is not None}


def processed_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """(vocab_size,) log-probs of what is really sampled from: after temperature and top-p."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    log_probs = logits.log_softmax(-1)
    if sampling.temperature == 0 or sampling.top_p >= 1:
        return log_probs
    ordered, order = log_probs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    outside = order[before >= sampling.top_p]
    return log_probs.index_fill(0, outside, -torch.inf).log_softmax(-1)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the end of the stop string that ends first, and whether there is one."""
    ends = [text.index(tag) + len(tag) for tag in stop if tag in text]
    return (text[: min(ends)], True) if ends else (text, False)
