"""One engine with its agent: turns started trajectories into finished ones.

A plain class, hosted by a Ray actor in training and used directly in tests. What a trajectory
samples from is the replica's engine, each turn timed and held to its weights.

New weights come at once, between turns, or between trajectories. A turn that they cut goes on from
its tokens: nothing that was sampled is dropped or sampled twice, and a stop string is found
wherever a cut falls. An engine looks for it in what it samples itself, so after a part that ends
with the beginning of one, tokens are asked for one by one until the text says whether it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl import plugins
from verl.agent.dialogue import derived_seed
from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import Listener, RolloutEngine, cut_at_stop
from verl.errors import PluginError, explain
from verl.model_files import load_tokenizer
from verl.remote_code import set_trust
from verl.rollout.interface import INTERRUPTED, build_engine
from verl.rollout.pool import Claims, Slots, trajectory_keys
from verl.rollout.schedule import Schedule, TurnPart, load_schedule
from verl.training.devices import device_type, pin_to_cores, rollout_dtype
from verl.types import Completion, EngineCounts, Sampling, Trajectory, TrajectoryKey, TurnTimes

logger = logging.getLogger(__name__)


class RolloutReplica:
    """A rollout engine and the agent that uses it; `replica` numbers it among the run's."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        """Nothing heavy yet: `engine.start` loads the model."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        if config.is_split and device_type(config.trainer.device) == "cpu":
            pin_to_cores(config.trainer.rollout_gpus, is_engine=True)
        self.config = config
        self.agent = agent_factory(config)
        self.engine = build_engine(config, replica)
        self.replica, self.clock = replica, BusyClock()
        on_gpu = device_type(config.trainer.device) == "cuda"
        self.room = Slots(config.max_num_seqs(on_gpu))
        self._claimed = Counter[int]()
        """Of each request, how many groups any replica has taken: the first of them counts."""
        self._finished: dict[TrajectoryKey, Trajectory] = {}
        """Those whose call is not answered yet, since others of it go on."""
        rollout = config.actor_rollout_ref.rollout
        interrupt = (lambda: self.engine.interrupt()) if rollout.interrupt_turns else None
        self.gate = WeightGate(load_schedule(rollout.replay), interrupt)
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
        rollout, names = self.config.actor_rollout_ref.rollout, trajectory_keys(starts, sampling)
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

    def finished(self) -> dict[TrajectoryKey, Trajectory]:
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
        self, starts: Sequence[Trajectory], names: Sequence[TrajectoryKey], sampling: Sampling,
        version: int, gate: WeightGate | None, position: int,
    ) -> Trajectory:  # fmt: skip
        start, held = starts[position], (self.engine, self.clock, gate, version)
        engine = TurnEngine(*held, names[position], self._decode, self.room)
        subject = f"agent.name={self.config.agent.name} at {start.prompt.uid}"
        expected = "the trajectory that it was given, with its group and sample, continued"
        try:
            with plugins.user_file_errors(subject, PluginError, expected):
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


class WeightGate:
    """Holds back what is about to sample while weights change, and the change while any samples.

    Of one event loop. A change that waits goes before whatever comes after it, so that it is
    delayed by what was sampling when it came and by nothing else. With a schedule it also waits for
    the turns that older weights are to sample, which go before it, and turns for their weights.
    Of trajectories that were asked for, since of others no turn may ever come.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        interrupt: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`interrupt` ends what samples, for a change that does not wait; a schedule says itself
        where turns end."""
        self._schedule = schedule
        self._interrupt = None if schedule else interrupt
        self.version = 0
        """Of the weights that are sampled from."""
        self._num_sampling = self._num_calls = 0
        self._is_changing = self._is_loading = False
        self._changes = asyncio.Lock()
        self._changed, self._drained = asyncio.Event(), asyncio.Event()

    def begin(self, names: Iterable[TrajectoryKey]) -> None:
        """A call for these trajectories has come."""
        self._num_calls += 1
        if self._schedule is not None:
            for name in names:
                self._schedule.begin(name)
        self._drained.set()

    def end(self, name: TrajectoryKey) -> None:
        """That trajectory has ended."""
        if self._schedule is not None:
            self._schedule.end(name)
        self._drained.set()

    @contextlib.asynccontextmanager
    async def sampling(
        self, at_least: int = 0, part: TurnPart | None = None
    ) -> AsyncIterator[int | None]:
        """Sample in the body, from weights of version `at_least` or later, which stay the same.

        A `part` of a turn that is in the schedule is sampled by the weights that it has there, or
        where those are gone, as after a resume, by those that there are; the body gets the number
        of the turn's tokens where it ends, if it is cut there.
        """
        planned, until = None, None
        if self._schedule is not None and part is not None:
            planned, until = self._schedule.version(part), self._schedule.until(part)
        while self._is_too_early(at_least, planned):
            await self._changed.wait()
        if planned is not None and planned < self.version:
            logger.warning("%s was sampled by version %d, which is gone: it is another run from "
                           "here on", part, planned)  # fmt: skip
        self._num_sampling += 1
        try:
            yield until
        finally:
            self._num_sampling -= 1
            if self._schedule is not None and part is not None:
                self._schedule.done(part)
            if not self._num_sampling:
                self._drained.set()

    def _is_too_early(self, at_least: int, planned: int | None) -> bool:
        if self._is_loading:
            return True
        if planned is not None:
            return self.version < planned
        return self._is_changing or self.version < at_least

    @contextlib.asynccontextmanager
    async def changing(self, version: int, num_calls: int = 0) -> AsyncIterator[None]:
        """Change the weights to those of `version` in the body, in which nothing samples.

        So many calls for trajectories were made before; with a schedule they come first.
        """
        async with self._changes:
            self._is_changing = True
            try:
                if self._interrupt and self._num_sampling and version > self.version:
                    await self._interrupt()
                while self._num_sampling or self._is_awaited(version, num_calls):
                    self._drained.clear()
                    await self._drained.wait()
                self._is_loading = True
                yield
                self.version = max(version, self.version)
            finally:
                self._is_changing = self._is_loading = False
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    def _is_awaited(self, version: int, num_calls: int) -> bool:
        """Whether older weights are still to sample what the schedule says."""
        if self._schedule is None:
            return False
        return self._num_calls < num_calls or not self._schedule.is_over_before(version)


Decode = Callable[[Sequence[int]], str]
Ask = Callable[[Sequence[int], Sampling], Awaitable[Completion]]
NUM_BEFORE = 16
"""Tokens before a turn that are decoded with it: some tokenizers drop a text's first space."""


@dataclass
class PartialTurn:
    """One turn's request, and the parts that are there."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    decode: Decode
    """Text of ids; asked only where a turn is cut."""
    said: list[Completion] = field(default_factory=list)
    _text: str = ""

    @property
    def num_tokens(self) -> int:
        """How many were sampled so far."""
        return sum(len(one.ids) for one in self.said)

    async def go_on(self, ask: Ask, until: int | None = None) -> Completion | None:
        """Sample by weights that stay the same until the turn is whole, which is then returned,
        interrupted, or `until` tokens long."""
        most = self.sampling.max_tokens
        until = most if until is None else min(until, most)
        while True:
            new = await ask(*self._request(until))
            if not self.said and until == most and new.finish_reason != INTERRUPTED:
                return new
            if new.ids:
                self.said.append(new)
            whole = self._whole(new.finish_reason)
            if whole or new.finish_reason == INTERRUPTED or self.num_tokens >= until:
                return whole

    def _request(self, until: int) -> tuple[Sequence[int], Sampling]:
        """For what is missing to `until` tokens of the turn.

        A later part has a seed of its own: with the first one's it would repeat its randomness.
        """
        num, sampling = self.num_tokens, self.sampling
        if not num:
            return self.prompt_ids, replace(sampling, max_tokens=until)
        most = 1 if begins_stop(self._text, sampling.stop) else until - num
        seed = None if sampling.seed is None else derived_seed(sampling.seed, num)
        ids = [*self.prompt_ids, *(i for one in self.said for i in one.ids)]
        return ids, replace(sampling, max_tokens=most, seed=seed)

    def _whole(self, finish_reason: str) -> Completion | None:
        """All parts in one, if the last, which ended for this reason, also ends the turn."""
        ids = tuple(i for one in self.said for i in one.ids)
        before = list(self.prompt_ids[-NUM_BEFORE:])
        text = self.decode([*before, *ids])[len(self.decode(before)) :]
        self._text, is_stopped = cut_at_stop(text, self.sampling.stop)
        if not is_stopped and finish_reason != "stop" and len(ids) < self.sampling.max_tokens:
            return None
        reason = "stop" if is_stopped or finish_reason == "stop" else "length"
        log_probs = tuple(p for one in self.said for p in one.log_probs)
        versions = tuple(one.weight_version for one in self.said for _ in one.ids)
        several = versions if len(set(versions)) > 1 else ()
        return Completion(ids, log_probs, self._text, reason, versions[-1], several)


def begins_stop(text: str, stop: Sequence[str]) -> bool:
    """Whether `text` ends with the beginning of a stop string, which may go on after it."""
    return any(text.endswith(tag[:n]) for tag in stop for n in range(1, len(tag)))


class BusyClock:
    """For which share of the time a replica was sampling."""

    def __init__(self) -> None:
        self._num_running, self._busy = 0, 0.0
        self._since = self._taken = time.perf_counter()

    def change(self, by: int) -> None:
        """One turn more, or less, is sampled from now on."""
        now = time.perf_counter()
        self._busy += now - self._since if self._num_running else 0.0
        self._num_running, self._since = self._num_running + by, now

    def take_share(self) -> float:
        """Since the last call, or since it was made."""
        self.change(0)
        elapsed, self._taken = self._since - self._taken, self._since
        busy, self._busy = self._busy, 0.0
        return busy / max(elapsed, 1e-9)


class TurnEngine(RolloutEngine):
    """The engine of one trajectory; without a gate, its weights are held for the whole of it."""

    def __init__(
        self, engine: RolloutEngine, clock: BusyClock, gate: WeightGate | None, at_least: int,
        name: TrajectoryKey = ("", 0, False), decode: Decode = str, room: Slots | None = None,
    ) -> None:  # fmt: skip
        """`name`: group, number and whether greedy, by which a schedule knows its turns; `decode`
        makes the text of a turn that new weights cut; of the `room` it has taken its part."""
        self._engine, self._clock = engine, clock
        self._gate, self._at_least, self.name = gate, at_least, name
        self._decode, self._num_turns = decode, 0
        self.times: list[TurnTimes] = []
        self._queued_s, self._counts = 0.0, EngineCounts()
        self._room, self._takes_room = room or Slots(), False
        self._take_room(True)

    def end(self) -> None:
        """No turn comes any more."""
        self._take_room(False)

    def _take_room(self, takes: bool) -> None:
        self._room.change(self._takes_room - takes)
        self._takes_room = takes

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._turn(prompt_ids, sampling, self._engine.generate)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        async def ask(ids: Sequence[int], sampling: Sampling) -> Completion:
            return await self._engine.stream(ids, sampling, listener)

        return await self._turn(prompt_ids, sampling, ask)

    async def _turn(self, prompt_ids: Sequence[int], sampling: Sampling, ask: Ask) -> Completion:
        """One turn, by several weights where new ones interrupt it."""
        parts, number = PartialTurn(prompt_ids, sampling, self._decode), self._num_turns
        self._num_turns += 1

        async def noted(ids: Sequence[int], sampling: Sampling) -> Completion:
            completion = await ask(ids, sampling)
            self._queued_s = completion.queued_s
            self._counts += completion.counts
            return completion

        self._take_room(True)
        try:
            while True:
                async with self._held(number, parts.num_tokens) as until:
                    whole = await parts.go_on(noted, until)
                if whole is not None:
                    return whole
        finally:
            self._take_room(False)

    @contextlib.asynccontextmanager
    async def _held(self, number: int, num_tokens: int) -> AsyncIterator[int | None]:
        """Hold the weights for the part of a turn that begins after so many of its tokens; gives
        the number after which a schedule has it end."""
        asked, gate = time.time(), self._gate
        part = (*self.name, number, num_tokens)
        held = gate.sampling(self._at_least, part) if gate else contextlib.nullcontext()
        async with held as until:
            began, self._queued_s, self._counts = time.time(), 0.0, EngineCounts()
            self._clock.change(+1)
            try:
                yield until
            finally:
                self._clock.change(-1)
                told = self._queued_s, self._counts
                self.times.append(TurnTimes(asked, began, time.time(), number, *told))
