"""A small engine based on transformers, which starts quickly and needs no further package.

Requests are sampled from together, a token each at a time, where padded rows have the model's own
log-probs (`together`); otherwise one after another. A single request continues the cache of the
last one where it can, so that the next turn of a dialogue computes only new tokens
(`context_cache`). It can be trained with; use vLLM for anything but tiny models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import torch

from verl.config import Config
from verl.ext.engines.context_cache import ContextCache, sequence_log_probs
from verl.ext.engines.request import Request
from verl.ext.engines.together import Together
from verl.model_files import check_finite, load_tokenizer, model_errors
from verl.rollout.interface import Listener, RolloutEngine
from verl.training.devices import device_type, rollout_dtype
from verl.training.loading import load_causal_lm
from verl.types import Completion, Sampling


class TransformersEngine(RolloutEngine):
    """A transformers model that samples a token for each of its requests at a time."""

    takes_weights = True

    def __init__(
        self, path: str, device: str, dtype: str, seed: int | None = None,
        may_share: bool = True, max_requests: int = 64, cache_gib: int = 2,
    ) -> None:  # fmt: skip
        """`path`: folder or hub name; `dtype`: bfloat16, float16 or float32.

        `seed` seeds the generator of all requests that have no seed of their own. With `may_share`,
        a request may continue the previous one and up to `max_requests`, whose keys and values fit
        in `cache_gib`, may be computed together; rounding then depends on the others.
        """
        self.path, self.device, self.dtype = path, device, getattr(torch, dtype)
        self.weight_version = 0
        self.model: Any = None
        self.tokenizer: Any = None
        self._generation_config: Any = None
        """The model's generation_config.json, which new weights do not include."""
        self._may_share, self._max_requests = may_share, max_requests
        self._generator = torch.Generator()
        """Used by requests without a seed."""
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._requests = list[Request]()
        """Those whose callers wait, in the order of their arrival."""
        self._current: asyncio.Task[None] | None = None
        """The step in which a token is sampled for each, awaited by all their callers."""
        self._context, self._together = ContextCache(), Together(max_bytes=cache_gib << 30)

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """Build the engine of a training run; replicas differ in their seed."""
        section, trainer = config.actor_rollout_ref, config.trainer
        device = device_type(trainer.device)
        may_share, seed = not trainer.deterministic, trainer.seed + replica
        rows, cache = config.max_num_seqs(device != "cpu"), section.rollout.cpu_kv_cache_gib
        options = seed, may_share, rows, cache
        return cls(section.model.path, device, rollout_dtype(config), *options)

    async def start(self) -> None:
        """Load the model and tokenizer. Raises ModelError if they cannot be found."""
        self.tokenizer = load_tokenizer(self.path)
        self.model = self._load(self.path)
        self._generation_config = self.model.generation_config
        check_finite(self.model.named_parameters(), f"weights of {self.path}")
        with model_errors(self.path, "a forward pass"):
            tolerance = self._context.judge(self.model, self.tokenizer, self.path)
            self._together.judge(self.model, self.tokenizer, self.path, tolerance)

    def _load(self, path: str) -> Any:
        model: Any = load_causal_lm(path, self.dtype, attention=None).eval()
        # Quantized weights are loaded where they can be computed, and some cannot be moved.
        return model if model.device.type == self.device else model.to(self.device)

    async def update_weights(self, folder: str, version: int) -> None:
        """Load the model of the folder; the previous one is freed first."""
        await self._between_steps()
        self._drop()
        self.model = await asyncio.to_thread(self._load, folder)
        self.model.generation_config = self._generation_config or self.model.generation_config
        self.weight_version = version

    async def sleep(self) -> None:
        """Free the device memory; `update_weights` loads a whole model later."""
        if self.device != "cpu":
            self._drop()
            torch.cuda.empty_cache()

    async def shutdown(self) -> None:
        self._drop()

    def _drop(self) -> None:
        """Drop the model and what was computed with it."""
        self.model = None
        self._context.reset()
        self._together.reset()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids` in a thread, without blocking the event loop."""
        return await self.stream(prompt_ids, sampling, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """Like `generate`, but call `listener` in the event loop with new text as it is sampled.

        If the caller is cancelled, sampling ends after the current token.
        """
        request = self._request(prompt_ids, sampling)
        self._requests.append(request)
        try:
            while request.reason is None:
                if self._current is None or self._current.done():
                    self._current = asyncio.create_task(self._next_step())
                await asyncio.shield(self._current)
                if text := request.new_text():
                    listener(text)
        finally:
            self._requests.remove(request)
            if not self._requests:
                await self._between_steps()  # a cancelled caller leaves nothing running
        return request.completion(self.weight_version)

    async def _next_step(self) -> None:
        waiting = [request for request in self._requests if request.reason is None]
        if first := waiting[: self._max_requests]:
            room = self._together.admitted([request.longest for request in first])
            await asyncio.to_thread(self._step, first[:room])

    async def _between_steps(self) -> None:
        """Wait for a step whose callers were cancelled."""
        if self._current is not None and not self._current.done():
            await asyncio.wait([self._current])

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        """Compute the ids without a cache, in a thread."""
        await self._between_steps()
        return await asyncio.to_thread(sequence_log_probs, self.model, list(ids))

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> Request:
        generator = self._generator
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed)
        return Request(list(prompt_ids), sampling, generator)

    def _step(self, requests: Sequence[Request]) -> None:
        """Sample a token for each request; a single one continues the context of the last one."""
        if self._may_share and self._together.fits:
            alone = len(requests) == 1 and requests[0] not in self._together
        else:
            requests, alone = requests[:1], True
        if alone:
            self._together.reset()
            if not self._may_share and not requests[0].ids:
                self._context.reset()
            logits = self._context.logits(self.model, requests[0].context)[None]
        else:
            contexts = {request: request.context for request in requests}
            logits = self._together.logits(self.model, contexts)
        end_ids = self._end_ids()
        for request, row in zip(requests, logits, strict=True):
            request.take(row, self.tokenizer, end_ids)

    def _end_ids(self) -> set[int]:
        """Return all ids that end a sequence."""
        eos = self.model.generation_config.eos_token_id
        end_ids = eos if isinstance(eos, list) else [eos]
        return {i for i in (*end_ids, self.tokenizer.eos_token_id) if i is not None}
