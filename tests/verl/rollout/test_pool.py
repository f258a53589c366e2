"""Who has room takes the next group, and nothing is begun twice or left out."""

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
    """A turn takes as many turns of the loop as its request has tokens."""

    def __init__(self) -> None:
        self.num_running = self.most_running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0)
        self.num_running -= 1
        return Completion((1,), (-1.0,), "x", "stop", 0)


class Planned:
    """Turns of a length that the prompt has, with a tool between them; notes what it begins."""

    def __init__(self, begun: list[tuple[str, int]], turns: int = 1, tool: int = 0) -> None:
        self.begun, self.turns, self.tool = begun, turns, tool

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        self.begun.append((start.group, start.sample))
        segments = list(start.segments)
        for turn in range(self.turns):
            for _ in range(self.tool if turn else 0):
                await asyncio.sleep(0)
            ended = await engine.generate((1,), Sampling(start.prompt.extra_info["ticks"]))
            segments.append(_policy_segment(ended))
        return replace(start, segments=segments, status=Status.ANSWERED)


def request(lengths: Sequence[int], size: int = 2, first: int = 0) -> list[Trajectory]:
    """Groups of so many, each of a length."""
    rows = [replace(prompt, extra_info={"ticks": ticks})
            for prompt, ticks in zip(prompts(99), lengths, strict=False)]  # fmt: skip
    return [start_trajectory(row, f"1/{first + number}", sample, seed=sample)
            for number, row in enumerate(rows) for sample in range(size)]  # fmt: skip


def hosts_of(number: int, slots: int, agent: Planned) -> list[RolloutReplica]:
    """So many, each of which decodes `slots` at once."""
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
    """The trainer's side of them."""
    draw = None if seed is None else random.Random(seed)
    group: Any = LocalGroup(hosts_of(number, slots, agent), draw)
    return RolloutReplicas(group, [], Restarts(0), is_divided=is_divided)


class Mortal(LocalGroup):
    """Three replicas that are lost once, after so many turns of the loop, and made anew."""

    def __init__(self, agent: Planned, draw: random.Random, life: int) -> None:
        super().__init__(hosts_of(3, 2, agent), draw)
        self.agent, self.life = agent, life

    def poll(
        self, asked: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        life, self.life = self.life, 0
        if life:
            self.run(life)
            raise ReplicaLost("replica 0 is lost")
        return super().poll(asked, check)

    def restart(self) -> None:
        self.close()
        self.loop, self.replicas = asyncio.new_event_loop(), hosts_of(3, 2, self.agent)

    def start_build(self, factory: object, arguments: object) -> list[Any]:
        return []

    def call(self, method: str, *args: Any) -> list[Any]:
        return []


def shares(ended: Sequence[Trajectory]) -> Counter[int]:
    """How many each replica finished."""
    return Counter(one.replica for one in ended)


def test_every_trajectory_is_begun_once_with_its_siblings() -> None:
    """Whatever takes how long, of several requests on their way: all come back in their order, none
    was begun twice, and a group is one replica's, while there are groups for all of them."""
    for seed in range(100):
        draw, begun = random.Random(seed), list[tuple[str, int]]()
        number, size = draw.randint(1, 4), draw.randint(1, 4)
        replicas = replicas_of(number, draw.randint(1, 6), Planned(begun, 2, 3), seed=seed)
        asked = []
        for first in range(0, 30, 10):
            lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 9))]
            asked.append(request(lengths, size, first))
        flights = [replicas.start(starts, Sampling(9)) for starts in asked]
        for starts, flight in zip(asked, flights, strict=True):
            ended = replicas.finish(flight)
            assert [(t.group, t.sample) for t in ended] == [(t.group, t.sample) for t in starts]
            if len(starts) // size >= number:
                assert len({(t.group, t.replica) for t in ended}) == len(starts) // size
        assert Counter(begun) == Counter((t.group, t.sample) for s in asked for t in s)
        replicas.group.close()  # type: ignore[attr-defined]


def test_what_lost_replicas_had_claimed_is_claimed_anew() -> None:
    """Whenever they are lost, of two requests on their way all come back, in their order."""
    for seed in range(50):
        draw = random.Random(seed)
        group: Any = Mortal(Planned([], 2, 3), draw, life=seed * 2 + 1)
        replicas = RolloutReplicas(group, [], Restarts(1))
        lengths = [draw.randint(1, 30) for _ in range(6)]
        asked = [request(lengths, 2, first) for first in (0, 10)]
        flights = [replicas.start(starts, Sampling(9)) for starts in asked]
        for starts, flight in zip(asked, flights, strict=True):
            ended = replicas.finish(flight)
            assert [(t.group, t.sample) for t in ended] == [(t.group, t.sample) for t in starts]
        assert replicas.restarts.of_replicas == 1
        group.close()


def test_whoever_has_short_dialogues_takes_more_of_them() -> None:
    """A group of long ones among short ones: its replica takes little else, the other the rest;
    divided beforehand, half of the short ones wait behind it."""
    lengths = [900] + [10] * 19
    for is_divided, expected in ((False, {2, 38}), (True, {20})):
        replicas = replicas_of(2, 2, Planned([]), is_divided)
        ended = replicas.generate(request(lengths), Sampling(9))
        assert set(shares(ended).values()) == expected
        replicas.group.close()  # type: ignore[attr-defined]


def test_where_all_have_room_each_takes_its_share_at_once() -> None:
    """Slots for everything do not let the first one that asks take it all."""
    replicas = replicas_of(2, 100, Planned([]))
    assert shares(replicas.generate(request([5] * 8), Sampling(9))) == {0: 8, 1: 8}
    replicas.group.close()  # type: ignore[attr-defined]


def test_who_waits_for_a_tool_leaves_its_room_to_others() -> None:
    """Two slots and slow tools: an engine is given further dialogues, so that it has two turns all
    the time; a dialogue whose tools answer at once keeps its slot to its end."""
    num_begun = {}
    for tool in (0, 400):
        begun = list[tuple[str, int]]()
        replicas = replicas_of(2, 2, Planned(begun, 2, tool))
        replicas.start(request([20] * 12), Sampling(9))
        replicas.group.run(150)  # type: ignore[attr-defined]
        hosts = replicas.group.replicas  # type: ignore[attr-defined]
        assert [host.engine.most_running for host in hosts] == [2, 2]
        num_begun[tool] = len(begun)
        replicas.group.close()  # type: ignore[attr-defined]
    assert num_begun[400] == 24 > num_begun[0]


def test_an_earlier_request_goes_first() -> None:
    """Of two requests the second is begun when all of the first is, not mixed with it."""
    begun = list[tuple[str, int]]()
    replicas = replicas_of(2, 2, Planned(begun))
    flights = [replicas.start(request([7] * 6, 2, first), Sampling(9)) for first in (0, 10)]
    for flight in flights:
        replicas.finish(flight)
    numbers = [int(group.split("/")[1]) for group, _ in begun]
    assert max(numbers[:12]) < 10 <= min(numbers[12:])
    replicas.group.close()  # type: ignore[attr-defined]


def test_a_request_that_has_begun_its_share_lets_the_next_one_begin() -> None:
    """Slots for both: the second, as ReMax's greedy dialogues are beside the sampled ones, does not
    wait until one of the first has ended."""
    begun = list[tuple[str, int]]()
    replicas = replicas_of(2, 8, Planned(begun))
    for first in (0, 10):
        replicas.start(request([1000] * 4, 2, first), Sampling(9))
    replicas.group.run(50)  # type: ignore[attr-defined]
    assert len(begun) == 16
    replicas.group.close()  # type: ignore[attr-defined]


def test_what_is_stopped_gives_its_room_back() -> None:
    """After a request that nobody waits for any more, the next has all slots."""
    replicas = replicas_of(2, 2, Planned([]))
    flight = replicas.start(request([1000] * 4), Sampling(9))
    replicas.group.run(50)  # type: ignore[attr-defined]
    replicas.abandon(flight)
    replicas.group.run(5)  # type: ignore[attr-defined]
    assert [host.slots.num_free for host in replicas.group.replicas] == [2, 2]  # type: ignore[attr-defined]
    assert len(replicas.generate(request([3] * 4), Sampling(9))) == 8
    replicas.group.close()  # type: ignore[attr-defined]
