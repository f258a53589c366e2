"""A small engine based on transformers that serves one request at a time and starts quickly.

It keeps the cache of the last context, so that the next turn only computes new tokens, where that
gives the model's own log-probs (`context_cache`). It can be trained with, one trajectory after
another; use vLLM for anything but tiny models.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from verl.config import Config
from verl.engine import cut_at_stop
from verl.ext.engines.context_cache import ContextCache, sequence_log_probs
from verl.model_files import check_finite, load_tokenizer, model_errors
from verl.rollout.interface import Listener, RolloutEngine
from verl.training.devices import device_type, rollout_dtype
from verl.training.loading import load_causal_lm
from verl.types import Completion, Sampling

REPLACEMENT = "\ufffd"
"""Character that the tokenizer returns for the first bytes of an incomplete character."""


class TransformersEngine(RolloutEngine):
    """A transformers model that serves requests one at a time."""

    takes_weights = True

    def __init__(
        self, path: str, device: str, dtype: str, seed: int | None = None, caches: bool = True
    ) -> None:
        """`path`: folder or hub name; `dtype`: bfloat16, float16 or float32.

        `seed` seeds the generator of all requests that have no seed of their own. With `caches`,
        a request may continue the previous one, and rounding then depends on that one.
        """
        self.path, self.device, self.dtype = path, device, getattr(torch, dtype)
        self.weight_version = 0
        self.model: Any = None
        self.tokenizer: Any = None
        self._generation_config: Any = None
        """The model's generation_config.json, which new weights do not include."""
        self._caches = caches
        self._generator = torch.Generator()
        """Used by requests without a seed."""
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._lock = threading.Lock()
        self._running: set[threading.Event] = set()
        """One event for each request, set when the request must end."""
        self._context = ContextCache()

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """Build the engine of a training run; replicas differ in their seed."""
        section, trainer = config.actor_rollout_ref, config.trainer
        device = device_type(trainer.device)
        caches, seed = not trainer.deterministic, trainer.seed + replica
        return cls(section.model.path, device, rollout_dtype(config), seed, caches)

    async def start(self) -> None:
        """Load the model and tokenizer. Raises ModelError if they cannot be found."""
        self.tokenizer = load_tokenizer(self.path)
        self.model = self._load(self.path)
        self._generation_config = self.model.generation_config
        check_finite(self.model.named_parameters(), f"weights of {self.path}")
        with model_errors(self.path, "a forward pass"):
            self._context.judge(self.model, self.tokenizer, self.path)

    def _load(self, path: str) -> Any:
        model: Any = load_causal_lm(path, self.dtype, attention=None).eval()
        # Quantized weights are loaded where they can be computed, and some cannot be moved.
        return model if model.device.type == self.device else model.to(self.device)

    async def update_weights(self, folder: str, version: int) -> None:
        """Load the model of the folder; the previous one is freed first."""
        with self._lock:
            self.model = None
            self._context.reset()
            self.model = await asyncio.to_thread(self._load, folder)
            self.model.generation_config = self._generation_config or self.model.generation_config
            self.weight_version = version

    async def sleep(self) -> None:
        """Free the device memory; `update_weights` loads a whole model later."""
        if self.device != "cpu":
            self.model = None
            self._context.reset()
            torch.cuda.empty_cache()

    async def shutdown(self) -> None:
        self.model = None
        self._context.reset()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids` in a thread, without blocking the event loop."""
        return await self.stream(prompt_ids, sampling, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """Like `generate`, but call `listener` in the event loop with new text as it is sampled.

        If the caller is cancelled, sampling ends after the current token.
        """
        loop = asyncio.get_running_loop()
        must_end = threading.Event()
        self._running.add(must_end)

        def notify(text: str) -> None:
            if must_end in self._running:
                listener(text)

        def notify_from_thread(text: str) -> None:
            loop.call_soon_threadsafe(notify, text)

        try:
            return await asyncio.to_thread(
                self._generate, list(prompt_ids), sampling, notify_from_thread, must_end.is_set
            )
        finally:
            self._running.discard(must_end)
            must_end.set()

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Compute the ids without a cache, in a thread."""

        def log_probs() -> list[float]:
            with self._lock:
                return sequence_log_probs(self.model, list(ids))

        return await asyncio.to_thread(log_probs)

    def _generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        listener: Listener,
        must_end: Callable[[], bool],
    ) -> Completion:
        with self._lock:
            if not self._caches:
                self._context.reset()
            ids: list[int] = []
            log_probs: list[float] = []
            text, num_reported, reason = "", 0, "length"
            for token, log_prob in self._samples(prompt_ids, sampling):
                ids.append(token)
                log_probs.append(log_prob)
                text, is_stopped = cut_at_stop(self.tokenizer.decode(ids), sampling.stop)
                if not text.endswith(REPLACEMENT):
                    listener(text[num_reported:])
                    num_reported = len(text)
                if is_stopped or token in self._end_ids():
                    reason = "stop"
                    break
                if len(ids) == sampling.max_tokens:
                    break
                if must_end():  # nobody waits for this completion any more
                    break
            return Completion(tuple(ids), tuple(log_probs), text, reason, self.weight_version)

    def _samples(self, prompt_ids: list[int], sampling: Sampling) -> Iterator[tuple[int, float]]:
        """Yield sampled ids and their log-probs, endlessly."""
        generator = self._generator
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed)
        context = list(prompt_ids)
        while True:
            log_probs = processed_log_probs(self._context.logits(self.model, context), sampling)
            if sampling.temperature == 0:
                token = int(log_probs.argmax())
            else:
                token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            yield token, float(log_probs[token])
            context.append(token)

    def _end_ids(self) -> set[int]:
        """Return all ids that end a sequence."""
        eos = self.model.generation_config.eos_token_id
        end_ids = eos if isinstance(eos, list) else [eos]
        return {i for i in (*end_ids, self.tokenizer.eos_token_id) if i is not None}


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
