"""One engine with its agent: turns started trajectories into finished ones.

A plain class, hosted by a Ray actor in training and used directly in tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from verl import plugins
from verl.agent.interface import Agent
from verl.config import Config
from verl.errors import PluginError, explain
from verl.model_files import load_tokenizer
from verl.remote_code import set_trust
from verl.rollout.in_flight import Claims, Room, names_of
from verl.rollout.interface import build_engine
from verl.rollout.schedule import of_run
from verl.rollout.turns import BusyClock, TurnEngine, WeightGate
from verl.training.devices import device_type, keep_to_cores, rollout_dtype
from verl.types import Name, Sampling, Trajectory


class RolloutReplica:
    """A rollout engine and the agent that uses it; `replica` numbers it among the run's."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        """Nothing heavy yet: `engine.start` loads the model."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        if config.is_split and device_type(config.trainer.device) == "cpu":
            keep_to_cores(config.trainer.rollout_gpus, is_engine=True)
        self.config = config
        self.agent = agent_factory(config)
        self.engine = build_engine(config, replica)
        self.replica, self.clock = replica, BusyClock()
        on_gpu = device_type(config.trainer.device) == "cuda"
        self.room = Room(config.max_num_seqs(on_gpu))
        self._claimed = Counter[int]()
        """Of each request, how many groups any replica has taken: the first of them counts."""
        self._finished: dict[Name, Trajectory] = {}
        """Those whose call is not answered yet, since others of it go on."""
        rollout = config.actor_rollout_ref.rollout
        interrupt = (lambda: self.engine.interrupt()) if rollout.interrupt_turns else None
        self.gate = WeightGate(of_run(rollout.replay), interrupt)
        self._pause = contextlib.AsyncExitStack()

    def dtype(self) -> str:
        """What the engine computes in, for those who write weights for it."""
        return rollout_dtype(self.config)

    async def rollout(
        self, starts: Sequence[Trajectory], sampling: Sampling, version: int = 0,
        claims: Claims | None = None,
    ) -> dict[int, Trajectory]:  # fmt: skip
        """Finish those of `starts` that `claims` gives, else all, by position; a failed tool is not
        an exception.

        Every token is sampled from weights of `version` or later, with `rollout.partial` those of a
        trajectory from several. Raises PluginError where the user's own agent fails, or gives
        another trajectory.
        """
        rollout, names = self.config.actor_rollout_ref.rollout, names_of(starts, sampling)
        claims = claims or Claims([range(len(starts))])
        begin = functools.partial(self._finish, starts, names, sampling, version)
        self.gate.begin(names[i] for i in claims.own)
        try:
            if rollout.partial or rollout.replay is not None:
                return await self._finish_claimed(claims, functools.partial(begin, self.gate))
            async with self.gate.sampling(version):
                return await self._finish_claimed(claims, functools.partial(begin, None))
        finally:
            for name in names:
                self._finished.pop(name, None)

    def claim(self, request: int, number: int) -> int:
        """Take so many more groups of a request; returns the number of the first of them."""
        first, self._claimed[request] = self._claimed[request], self._claimed[request] + number
        return first

    def finished(self) -> dict[Name, Trajectory]:
        """What is finished of calls that are not answered yet."""
        return dict(self._finished)

    def busy_share(self) -> float:
        """For which share of the time since the last call a request was running."""
        return self.clock.take_share()

    async def update_weights(
        self, folder: str, version: int, is_adapter: bool = False, num_calls: int = 0
    ) -> None:
        """Have the engine take new weights as soon as what it samples now is whole, or cut.

        `num_calls` of `rollout` were made before this one.
        """
        async with self.gate.changing(version, num_calls):
            # Ray may begin calls in another order; then newer weights are there already.
            if version > self.gate.version:
                await self.engine.update_weights(folder, version, is_adapter)

    async def pause(self, version: int, num_calls: int = 0) -> None:
        """Return when nothing is sampled any more, nor before `receive_weights` has ended."""
        await self._pause.enter_async_context(self.gate.changing(version, num_calls))

    async def receive_weights(self, stream: str, version: int) -> None:
        """As `update_weights` after `pause`, with what ranks send to the engine's workers."""
        async with self._pause:
            await self.engine.receive_weights(stream, version)

    async def _finish_claimed(
        self, claims: Claims, finish: Callable[[int], Coroutine[Any, Any, Trajectory]]
    ) -> dict[int, Trajectory]:
        """Begin what is claimed whenever there is room."""
        tasks: dict[int, asyncio.Task[Trajectory]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                await claims.take(
                    self.room,
                    lambda: sum(not task.done() for task in tasks.values()),
                    lambda chosen: tasks.update((i, group.create_task(finish(i))) for i in chosen),
                )
        except ExceptionGroup as failed:
            raise failed.exceptions[0]  # noqa: B904 - it has a cause of its own
        return {i: task.result() for i, task in tasks.items()}

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.actor_rollout_ref.model.path)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    async def _finish(
        self, starts: Sequence[Trajectory], names: Sequence[Name], sampling: Sampling,
        version: int, gate: WeightGate | None, position: int,
    ) -> Trajectory:  # fmt: skip
        start, held = starts[position], (self.engine, self.clock, gate, version)
        engine = TurnEngine(*held, names[position], self._decode, self.room)
        subject = f"agent.name={self.config.agent.name} at {start.prompt.uid}"
        expected = "the trajectory that it was given, with its group and sample, continued"
        try:
            with plugins.blamed(subject, PluginError, expected):
                ended = await self.agent.run(start, engine, sampling)
        finally:
            self.gate.end(engine.name)
            engine.end()
        if not isinstance(ended, Trajectory):
            raise PluginError(explain(subject, type(ended).__name__, expected, "return it"))
        if (ended.group, ended.sample) != (start.group, start.sample):
            got = f"group {ended.group!r}, sample {ended.sample!r}"
            raise PluginError(explain(subject, got, expected, "keep them: dataclasses.replace"))
        ended.replica, ended.turn_times = self.replica, engine.times
        self._finished[engine.name] = ended
        return ended
