"""Rollout replicas in one event loop that runs while the driver waits, without Ray or threads."""

from __future__ import annotations

import asyncio
import inspect
import operator
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.rollout.replica import RolloutReplica
from verl.single_controller.actors import ActorLocation


class LocalGroup:
    """The part of a group of actors that `RolloutReplicas` needs.

    As in an actor with concurrent calls, calls may start out of order: `draw` determines after how
    many iterations of the loop each call starts.
    """

    def __init__(
        self, replicas: Sequence[RolloutReplica], draw: random.Random | None = None
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self._turn = threading.Lock()  # the thread that writes a checkpoint also fetches
        self.replicas, self._draw = list(replicas), draw

    def __len__(self) -> int:
        return len(self.replicas)

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("here", "localhost", ())] * len(self)

    def submit(self, index: int, method: str, *args: Any) -> Any:
        ticks = 0 if self._draw is None else self._draw.randrange(4)

        async def call() -> Any:
            for _ in range(ticks):
                await asyncio.sleep(0)
            answer = operator.attrgetter(method)(self.replicas[index])(*args)
            return await answer if inspect.isawaitable(answer) else answer

        with self._turn:
            return self.loop.create_task(call())

    def gather(self, calls: Sequence[Any], check: Callable[[], None] = lambda: None) -> list[Any]:
        with self._turn:
            return [self.loop.run_until_complete(call) for call in calls]

    def poll(
        self, calls: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        waiting = asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with self._turn:
            done, _ = self.loop.run_until_complete(waiting)
        return {call: call.result() for call in done}

    def is_done(self, call: Any) -> bool:
        return bool(call.done())

    def run(self, ticks: int) -> None:
        """Run the loop for `ticks` iterations while the driver does something else."""

        async def pass_time() -> None:
            for _ in range(ticks):
                await asyncio.sleep(0)

        with self._turn:
            self.loop.run_until_complete(pass_time())

    def close(self) -> None:
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending))
        self.loop.close()
