"""Replicas with free slots claim the next group; nothing is sampled twice or left out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.recording import prompts
from verl.agent.dialogue import _policy_segment
from verl.config import Config
from verl.errors import ReplicaLost
from verl.rollout.interface import RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import Restarts
from verl.types import Completion, Sampling, Status, Trajectory, start_trajectory

pytestmark = pytest.mark.asynchrony


class Ticks(RolloutEngine):
    """An engine whose turns take as many iterations of the event loop as `max_tokens`."""

    def __init__(self) -> None:
        self.num_running = self.max_running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0)
        self.num_running -= 1
        return Completion((1,), (-1.0,), "x", "stop", 0)


class Planned:
    """An agent whose prompts say how long turns take, with a tool between them; logs starts."""

    def __init__(self, started: list[tuple[str, int]], turns: int = 1, tool: int = 0) -> None:
        self.started, self.turns, self.tool = started, turns, tool

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        self.started.append((start.group, start.sample))
        segments = list(start.segments)
        for turn in range(self.turns):
            for _ in range(self.tool if turn else 0):
                await asyncio.sleep(0)
            completion = await engine.generate((1,), Sampling(start.prompt.extra_info["ticks"]))
            segments.append(_policy_segment(completion))
        return replace(start, segments=segments, status=Status.ANSWERED)


def make_starts(lengths: Sequence[int], size: int = 2, first: int = 0) -> list[Trajectory]:
    """Return started groups of `size` trajectories, one group for each length."""
    rows = [replace(prompt, extra_info={"ticks": ticks})
            for prompt, ticks in zip(prompts(99), lengths, strict=False)]  # fmt: skip
    return [start_trajectory(row, f"1/{first + number}", sample, seed=sample)
            for number, row in enumerate(rows) for sample in range(size)]  # fmt: skip


def hosts_of(number: int, slots: int, agent: Planned) -> list[RolloutReplica]:
    """Return `number` replicas with `slots` slots each."""
    config, hosts = Config(), []
    config.actor_rollout_ref.model.path = "nowhere"
    config.actor_rollout_ref.rollout.max_num_seqs = slots
    for index in range(number):
        hosts.append(RolloutReplica(config, lambda _: agent, index))
        hosts[-1].engine = Ticks()
    return hosts


def replicas_of(
    number: int, slots: int, agent: Planned, is_divided: bool = False, seed: int | None = None
) -> RolloutReplicas:
    """Return the trainer's side of `hosts_of`."""
    draw = None if seed is None else random.Random(seed)
    group: Any = LocalGroup(hosts_of(number, slots, agent), draw)
    return RolloutReplicas(group, [], Restarts(0), is_divided=is_divided)


class Mortal(LocalGroup):
    """Three replicas that are lost once, after `life` iterations of the loop, and restarted."""

    def __init__(self, agent: Planned, draw: random.Random, life: int) -> None:
        super().__init__(hosts_of(3, 2, agent), draw)
        self.agent, self.life = agent, life

    def poll(
        self, calls: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        life, self.life = self.life, 0
        if life:
            self.run(life)
            raise ReplicaLost("replica 0 is lost")
        return super().poll(calls, check)

    def restart(self) -> None:
        self.close()
        self.loop, self.replicas = asyncio.new_event_loop(), hosts_of(3, 2, self.agent)

    def start_build(self, factory: object, arguments: object) -> list[Any]:
        return []

    def call(self, method: str, *args: Any) -> list[Any]:
        return []


def shares(finished: Sequence[Trajectory]) -> Counter[int]:
    """Return how many trajectories each replica finished."""
    return Counter(trajectory.replica for trajectory in finished)


def test_every_trajectory_is_sampled_once_with_its_group() -> None:
    """For any timing of several requests, each trajectory is sampled once and returned in order.

    A group stays on one replica if there are at least as many groups as replicas.
    """
    for seed in range(100):
        draw, started = random.Random(seed), list[tuple[str, int]]()
        number, size = draw.randint(1, 4), draw.randint(1, 4)
        replicas = replicas_of(number, draw.randint(1, 6), Planned(started, 2, 3), seed=seed)
        starts_of_requests = []
        for first in range(0, 30, 10):
            lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
            starts_of_requests.append(make_starts(lengths, size, first))
        requests = [replicas.start(starts, Sampling(9)) for starts in starts_of_requests]
        for starts, request in zip(starts_of_requests, requests, strict=True):
            finished = replicas.finish(request)
            assert [(t.group, t.sample) for t in finished] == [(t.group, t.sample) for t in starts]
            if len(starts) // size >= number:
                assert len({(t.group, t.replica) for t in finished}) == len(starts) // size
        assert Counter(started) == Counter(
            (t.group, t.sample) for starts in starts_of_requests for t in starts
        )
        replicas.group.close()  # type: ignore[attr-defined]


def test_groups_of_lost_replicas_are_claimed_again() -> None:
    """Whenever the replicas are lost, all trajectories of two requests come back in order."""
    for seed in range(50):
        draw = random.Random(seed)
        group: Any = Mortal(Planned([], 2, 3), draw, life=seed * 2 + 1)
        replicas = RolloutReplicas(group, [], Restarts(1))
        lengths = [draw.randint(1, 30) for _ in range(6)]
        starts_of_requests = [make_starts(lengths, 2, first) for first in (0, 10)]
        requests = [replicas.start(starts, Sampling(9)) for starts in starts_of_requests]
        for starts, request in zip(starts_of_requests, requests, strict=True):
            finished = replicas.finish(request)
            assert [(t.group, t.sample) for t in finished] == [(t.group, t.sample) for t in starts]
        assert replicas.restarts.of_replicas == 1
        group.close()


def test_a_replica_with_short_dialogues_claims_more() -> None:
    """The replica of one group of long dialogues among short ones claims little else.

    If the batch is divided beforehand, half of the short dialogues wait behind the long ones.
    """
    lengths = [900] + [10] * 19
    for is_divided, expected in ((False, {2, 38}), (True, {20})):
        replicas = replicas_of(2, 2, Planned([]), is_divided)
        finished = replicas.generate(make_starts(lengths), Sampling(9))
        assert set(shares(finished).values()) == expected
        replicas.group.close()  # type: ignore[attr-defined]


def test_with_enough_slots_each_replica_takes_its_share_at_once() -> None:
    """The first replica does not claim everything, even if it has slots for everything."""
    replicas = replicas_of(2, 100, Planned([]))
    assert shares(replicas.generate(make_starts([5] * 8), Sampling(9))) == {0: 8, 1: 8}
    replicas.group.close()  # type: ignore[attr-defined]


def test_a_dialogue_that_waits_for_a_tool_frees_its_slot() -> None:
    """With two slots and slow tools, an engine starts further dialogues and always has two turns.

    With tools that answer immediately, a dialogue keeps its slot to its end.
    """
    num_started = {}
    for tool in (0, 400):
        started = list[tuple[str, int]]()
        replicas = replicas_of(2, 2, Planned(started, 2, tool))
        replicas.start(make_starts([20] * 12), Sampling(9))
        replicas.group.run(150)  # type: ignore[attr-defined]
        hosts = replicas.group.replicas  # type: ignore[attr-defined]
        assert [host.engine.max_running for host in hosts] == [2, 2]
        num_started[tool] = len(started)
        replicas.group.close()  # type: ignore[attr-defined]
    assert num_started[400] == 24 > num_started[0]


def test_an_earlier_request_goes_first() -> None:
    """The second of two requests starts after all of the first, not mixed with it."""
    started = list[tuple[str, int]]()
    replicas = replicas_of(2, 2, Planned(started))
    requests = [replicas.start(make_starts([7] * 6, 2, first), Sampling(9)) for first in (0, 10)]
    for request in requests:
        replicas.finish(request)
    numbers = [int(group.split("/")[1]) for group, _ in started]
    assert max(numbers[:12]) < 10 <= min(numbers[12:])
    replicas.group.close()  # type: ignore[attr-defined]


def test_a_request_that_runs_its_share_lets_the_next_request_start() -> None:
    """With slots for both, a second request does not wait for a dialogue of the first to end."""
    started = list[tuple[str, int]]()
    replicas = replicas_of(2, 8, Planned(started))
    for first in (0, 10):
        replicas.start(make_starts([1000] * 4, 2, first), Sampling(9))
    replicas.group.run(50)  # type: ignore[attr-defined]
    assert len(started) == 16
    replicas.group.close()  # type: ignore[attr-defined]


def test_an_abandoned_request_frees_its_slots() -> None:
    """The next request can use all slots."""
    replicas = replicas_of(2, 2, Planned([]))
    request = replicas.start(make_starts([1000] * 4), Sampling(9))
    replicas.group.run(50)  # type: ignore[attr-defined]
    replicas.abandon(request)
    replicas.group.run(5)  # type: ignore[attr-defined]
    assert [host.slots.num_free for host in replicas.group.replicas] == [2, 2]  # type: ignore[attr-defined]
    assert len(replicas.generate(make_starts([3] * 4), Sampling(9))) == 8
    replicas.group.close()  # type: ignore[attr-defined]
