"""An engine whose turns end when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from tests.inference.scripted import SpellingEngine
from verl.types import Completion, Sampling


class PacedEngine(SpellingEngine):
    """Streams a turn's text at once, but ends the turn only when the test releases it."""

    def __init__(self, script: Sequence[str]) -> None:
        super().__init__(script)
        self.turns = threading.Semaphore(0)
        self.was_cancelled = threading.Event()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Callable[[str], None]
    ) -> Completion:
        completion = await super().stream(prompt_ids, sampling, listener)
        try:
            while not self.turns.acquire(blocking=False):
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return completion
