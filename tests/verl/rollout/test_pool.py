"""Replicas share a request by whole groups; nothing is sampled twice or left out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.recording import prompts
from verl.agent.dialogue import _policy_segment
from verl.config import Config
from verl.rollout.interface import RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.types import Completion, Sampling, Status, Trajectory, start_trajectory
from verl.weights.files import Files

pytestmark = pytest.mark.asynchrony


class Ticks(RolloutEngine):
    """An engine whose turns take as many iterations of the event loop as `max_tokens`."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0)
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


def hosts_of(number: int, agent: Planned) -> list[RolloutReplica]:
    """Return `number` replicas with engines of this file."""
    config, hosts = Config(), []
    config.actor_rollout_ref.model.path = "nowhere"
    for index in range(number):
        hosts.append(RolloutReplica(config, lambda _: agent, index))
        hosts[-1].engine = Ticks()
    return hosts


def replicas_of(number: int, agent: Planned, seed: int) -> RolloutReplicas:
    """Return the trainer's side of `hosts_of`."""
    group: Any = LocalGroup(hosts_of(number, agent), random.Random(seed))
    return RolloutReplicas(group, Files(Config()))


def test_every_trajectory_is_sampled_once_with_its_group() -> None:
    """For any timing of several requests, each trajectory is sampled once and returned in order.

    A group stays on one replica if there are at least as many groups as replicas.
    """
    for seed in range(100):
        draw, started = random.Random(seed), list[tuple[str, int]]()
        number, size = draw.randint(1, 4), draw.randint(1, 4)
        replicas = replicas_of(number, Planned(started, 2, 3), seed)
        starts_of_requests = []
        for first in range(0, 30, 10):
            lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
            starts_of_requests.append(make_starts(lengths, size, first))
        requests = [replicas.start(starts, Sampling(9)) for starts in starts_of_requests]
        for starts, request in zip(starts_of_requests, requests, strict=True):
            finished = replicas.finish(request)
            assert [(t.group, t.sample) for t in finished] == [(t.group, t.sample) for t in starts]
            if len(starts) // size >= number:
                assert len({(t.group, t.timeline.replica) for t in finished}) == len(starts) // size
        assert Counter(started) == Counter(
            (t.group, t.sample) for starts in starts_of_requests for t in starts
        )
        replicas.group.close()  # type: ignore[attr-defined]
