"""A rollout engine whose steps take known times: it sleeps instead of computing.

It has the loop of a real engine and none of the model's formulas: whole steps, a waiting queue,
chunked prefill during decoding, and a prefix cache in blocks of 16 tokens. Its text follows from
the request's seed: some filler, then a search or an answer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.engine import RolloutEngine
from verl.types import Completion, Sampling

BLOCK, CHUNK = 16, 512
"""Tokens of a cached block, and the maximum number of tokens of a step."""
MAX_DELAY = 0.1
"""Seconds by which steps may start late without taking longer in total."""


@dataclass(frozen=True)
class Pace:
    """The speed of an engine, and the distribution of its turns."""

    step_s: float
    sequence_s: float
    prefill_tokens_s: float
    slots: int
    words_p50: float
    """Median number of characters of a turn."""
    sigma: float
    """Standard deviation of the logarithm of that number."""
    search_share: float
    """Share of turns that search."""


@dataclass
class _Request:
    ids: tuple[int, ...]
    prefill_left: int
    decode_left: int
    done: asyncio.Future[None]


@dataclass
class PacedEngine(RolloutEngine):
    """An engine that sleeps as `pace` says. One token is one byte."""

    pace: Pace
    steps: int = 0
    _waiting: deque[_Request] = field(default_factory=deque)
    _running: list[_Request] = field(default_factory=list)
    _cached: set[int] = field(default_factory=set)
    _loop: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Wait for a free slot, the prefill and the decoding; returns the seed's text."""
        text, ids = self._text(sampling), tuple(prompt_ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(ids, -1, len(text), future))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_steps())
        await future
        sampled = tuple(text.encode())
        self._cache(ids + sampled)
        return Completion(sampled, (-1.0,) * len(sampled), text, "stop")

    def _text(self, sampling: Sampling) -> str:
        draw = random.Random(sampling.seed)
        letters = int(self.pace.words_p50 * math.exp(draw.gauss(0, self.pace.sigma)))
        is_search = draw.random() < self.pace.search_share
        end = f"<search> {draw.getrandbits(40)} </search>" if is_search else "<answer> x </answer>"
        letters = max(1, min(letters, sampling.max_tokens) - len(end))
        return "a" * letters + end

    async def _run_steps(self) -> None:
        """Run steps until no request is left."""
        loop = asyncio.get_running_loop()
        step_end = loop.time()
        while self._waiting or self._running:
            budget = CHUNK - sum(not request.prefill_left for request in self._running)
            while self._waiting and len(self._running) < self.pace.slots:
                request = self._waiting.popleft()
                request.prefill_left = self._uncached(request.ids)
                self._running.append(request)
            num_prefilled = 0
            for request in self._running:
                count = min(request.prefill_left, budget - num_prefilled)
                request.prefill_left -= count
                num_prefilled += count
            decoding = [request for request in self._running if not request.prefill_left]
            seconds = self.pace.step_s + self.pace.sequence_s * len(decoding)
            seconds += num_prefilled / self.pace.prefill_tokens_s
            # The end is counted from the end of the previous step: a step that starts late because
            # other processes used this core does not make the rollout longer.
            step_end = max(step_end, loop.time() - MAX_DELAY) + seconds
            await asyncio.sleep(max(0.0, step_end - loop.time()))
            self.steps += 1
            for request in decoding:
                request.decode_left -= 1
                if not request.decode_left:
                    self._running.remove(request)
                    request.done.set_result(None)

    def _uncached(self, ids: tuple[int, ...]) -> int:
        """Count the tokens after the longest cached prefix, at least 1, and cache all blocks."""
        num_cached = 0
        while num_cached + BLOCK <= len(ids) and hash(ids[: num_cached + BLOCK]) in self._cached:
            num_cached += BLOCK
        self._cache(ids)
        return max(1, len(ids) - num_cached)

    def _cache(self, ids: tuple[int, ...]) -> None:
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        self._cached.update(hash(ids[:end]) for end in ends)

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Drop the prefix cache, which belongs to the old weights."""
        self._cached.clear()
