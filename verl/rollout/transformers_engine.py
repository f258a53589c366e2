"""A small engine over transformers for one dialogue at a time: starts at once, streams tokens.

It keeps the key-value cache of the last context, so that the next turn only reads what is new.
Training works with it, one trajectory after another; for more than a tiny model use vLLM.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from verl.config import Config
from verl.engine import cut_at_stop
from verl.model_files import check_finite, load_tokenizer
from verl.rollout.interface import INTERRUPTED, Listener, RolloutEngine
from verl.training.devices import device_type, rollout_dtype
from verl.training.models import load_causal_lm
from verl.types import Completion, Sampling

REPLACEMENT = "\ufffd"
"""What decoding shows for the first bytes of an unfinished character."""


class TransformersEngine(RolloutEngine):
    """One transformers model; requests wait for each other."""

    takes_weights = True
    can_interrupt = True

    def __init__(
        self, path: str, device: str, dtype: str, seed: int | None = None, caches: bool = True
    ) -> None:
        """`path`: folder or hub name; `dtype`: bfloat16, float16 or float32.

        `seed` is of requests that bring none, once for all of them. With `caches` the last bits of
        a request depend on the one before, which it may continue.
        """
        self.path, self.device, self.dtype = path, device, getattr(torch, dtype)
        self.weight_version = 0
        self.model: Any = None
        self.tokenizer: Any = None
        self._declared: Any = None
        """The model's generation_config.json, which new weights come without."""
        self._caches = caches
        self._own = torch.Generator()
        self._own.seed() if seed is None else self._own.manual_seed(seed)
        self._lock = threading.Lock()
        self._running: set[threading.Event] = set()
        """One for each request, set when it is to end."""
        self._forget()

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """The engine of a training run; replicas differ in their seed."""
        section, trainer = config.actor_rollout_ref, config.trainer
        device = device_type(trainer.device)
        caches, seed = not trainer.deterministic, trainer.seed + replica
        return cls(section.model.path, device, rollout_dtype(config), seed, caches)

    async def start(self) -> None:
        """Load model and tokenizer; raises ModelError when they are not there."""
        self.tokenizer = load_tokenizer(self.path)
        self.model = self._load(self.path)
        self._declared = self.model.generation_config
        check_finite(self.model.named_parameters(), f"weights of {self.path}")

    def _load(self, path: str) -> Any:
        model: Any = load_causal_lm(path, self.dtype, attention=None)
        return model.eval().to(self.device)

    def _forget(self) -> None:
        """Drop the cache of keys and values: another dialogue begins, or other weights."""
        self._cache, self._cached_ids = DynamicCache(), list[int]()

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Load the folder's model in place of the one before, which is freed first."""
        assert not is_adapter, "this engine says that it takes no adapter"
        with self._lock:
            self.model = None
            self._forget()
            self.model = await asyncio.to_thread(self._load, folder)
            self.model.generation_config = self._declared or self.model.generation_config
            self.weight_version = version

    async def sleep(self) -> None:
        """Free the device: the next weights come as a whole model."""
        if self.device != "cpu":
            self.model = None
            self._forget()
            torch.cuda.empty_cache()

    async def shutdown(self) -> None:
        """Free the model."""
        self.model = None
        self._forget()

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
        self._running.add(is_over)

        def hear(text: str) -> None:
            if is_over in self._running:
                listener(text)

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(hear, text)

        try:
            return await asyncio.to_thread(
                self._generate, list(prompt_ids), sampling, tell, is_over.is_set
            )
        finally:
            self._running.discard(is_over)
            is_over.set()

    async def interrupt(self) -> None:
        """End each request with the token at hand; those that wait for their turn have none."""
        for is_over in self._running:
            is_over.set()

    def _generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        tell: Listener,
        is_over: Callable[[], bool],
    ) -> Completion:
        with self._lock:
            if not self._caches:
                self._forget()
            ids: list[int] = []
            log_probs: list[float] = []
            text, told, reason = "", 0, "length"
            if is_over():
                return Completion((), (), "", INTERRUPTED, self.weight_version)
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
                if len(ids) == sampling.max_tokens:
                    break
                if is_over():
                    reason = INTERRUPTED
                    break
            return Completion(tuple(ids), tuple(log_probs), text, reason, self.weight_version)

    def _samples(self, prompt_ids: list[int], sampling: Sampling) -> Iterator[tuple[int, float]]:
        """Sampled ids with their log-probs, without end."""
        generator = self._own
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed)
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
            self._forget()  # another dialogue, or the same one again
            known = 0
        new, cache = torch.tensor([context[known:]], device=self.model.device), self._cache
        self._forget()  # a forward that fails leaves it filled in some layers only
        answer = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache, self._cached_ids = cache, context.copy()
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
