"""How old what is trained on may be, what is sampled ahead, and that nothing is lost of it."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.recording import prompts
from verl.agent.dialogue import _policy_segment
from verl.agent.environment import Environment
from verl.checkpoint import prefetched
from verl.config import Config
from verl.data import PromptSampler
from verl.rewards.interface import EachAlone, Reward
from verl.rollout import schedule
from verl.rollout.interface import INTERRUPTED, RolloutEngine
from verl.rollout.pool import RetryingRollout
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import Restarts
from verl.trainer.collection import RolloutCollector
from verl.trainer.metrics import Timings
from verl.types import Completion, Origin, Sampling, Status, Trajectory, start_trajectory

pytestmark = pytest.mark.asynchrony
NUM_ROWS, BATCH, GROUP = 8, 3, 2


@dataclass
class Folders:
    """The ranks' side of a hand-over: which versions lie in files."""

    present: set[int] = field(default_factory=set)

    def share_policy(
        self, directory: Path, version: int, needed: Sequence[int], dtype: str, is_adapter: bool
    ) -> float:
        assert set(needed) <= self.present
        self.present = {*needed, version}
        return 0.0


class TickingEngine(RolloutEngine):
    """Takes some turns of the loop for everything; tokens follow from weights, seed and place."""

    takes_weights = True
    can_interrupt = True

    def __init__(self, draw: random.Random, folders: Folders) -> None:
        self._draw, self._folders = draw, folders
        self.weight_version, self.num_running, self._num_interrupts = 0, 0, 0

    async def _work(self, most: int = 12) -> None:
        for _ in range(self._draw.randrange(most)):
            await asyncio.sleep(0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        version, before, reason = self.weight_version, self._num_interrupts, "length"
        source = random.Random(f"{version} {sampling.seed}")
        ids: list[int] = []
        self.num_running += 1
        try:
            while len(ids) < sampling.max_tokens:
                await self._work(most=5)
                if self._num_interrupts > before:
                    reason = INTERRUPTED
                    break
                ids.append(source.randrange(1000))
        finally:
            self.num_running -= 1
        assert self.weight_version == version, "weights changed under a request"
        return Completion(tuple(ids), (-1.0,) * len(ids), "x" * len(ids), reason, version)

    async def interrupt(self) -> None:
        self._num_interrupts += 1

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        for _ in range(2):
            assert version in self._folders.present, "its files were removed while they were read"
            assert self.num_running == 0
            await self._work()
        self.weight_version = version


class Letters:
    """Decodes every id as one letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


class TurningAgent:
    """Takes one to three turns, with a tool between them that answers after a while."""

    def __init__(self, draw: random.Random, broken_share: float = 0.0) -> None:
        self._draw, self._broken_share = draw, broken_share

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        segments, planned = list(start.segments), random.Random(start.seed)
        for turn in range(planned.randint(1, 3)):
            request = Sampling(planned.randint(1, 4), seed=start.seed and start.seed + turn)
            segments.append(_policy_segment(await engine.generate((1,), request)))
            for _ in range(self._draw.randrange(9)):
                await asyncio.sleep(0)
        broke = self._draw.random() < self._broken_share
        return replace(start, segments=segments, status=Status.FAILED if broke else Status.ANSWERED)


@dataclass
class World:
    """A run without ranks: what is sampled for each step, and the weights after it."""

    collector: RolloutCollector
    replicas: RolloutReplicas
    group: LocalGroup
    folders: Folders

    def step(self, number: int, ticks: int = 0) -> list[Trajectory]:
        """Take a step's trajectories, and train for so long."""
        if self.replicas.version == 0:
            self.replicas.update_weights(self.folders)
        samples, _ = self.collector.collect(number, Timings())
        self.group.run(ticks)
        self.replicas.update_weights(self.folders)
        return samples.trajectories


@contextmanager
def world(
    seed: int, staleness: int, num_steps: int = 9, with_filter: bool = False, broken: float = 0.0,
    out: Path | None = None, replay: Path | None = None, delays: int | None = None,
    num_replicas: int | None = None,
) -> Iterator[World]:  # fmt: skip
    """Sampling of the prompts of `seed`, with delays drawn from it too unless from `delays`."""
    draw, config, folders = random.Random(seed if delays is None else delays), Config(), Folders()
    kept = ExitStack()
    out = out or Path(kept.enter_context(tempfile.TemporaryDirectory()))
    config.trainer.default_local_dir = str(out)
    config.actor_rollout_ref.model.path = "nowhere"
    rollout = config.actor_rollout_ref.rollout
    rollout.max_staleness, rollout.partial, rollout.n_agent = staleness, seed % 2 == 0, GROUP
    rollout.interrupt_turns = seed % 4 == 0
    rollout.replay = None if replay is None else str(replay / schedule.FOLDER)
    config.data.train_batch_size, config.trainer.max_lost_share = BATCH, 0.5
    config.algorithm.filter_groups.enable = with_filter
    config.algorithm.filter_groups.max_num_gen_batches = 3
    hosts = []
    for number in range(num_replicas or 1 + seed % 3):
        hosts.append(RolloutReplica(config, lambda _: TurningAgent(draw, broken), number))
        hosts[-1].engine = TickingEngine(draw, folders)
        hosts[-1]._tokenizer = Letters()
    group: Any = LocalGroup(hosts, draw)
    replicas = RolloutReplicas(
        group, [], Restarts(0), overlaps=staleness > 0, is_divided=replay is not None
    )
    collector = RolloutCollector(
        config, RetryingRollout(replicas, Environment()), prompts(NUM_ROWS),
        PromptSampler(NUM_ROWS, BATCH, seed=seed), EachAlone(lambda t: Reward(draw.random() > 0.6)),
        last_step=num_steps,
    )  # fmt: skip
    with kept:
        yield World(collector, replicas, group, folders)
        group.close()


def ages(step: int, trajectories: Sequence[Trajectory]) -> set[int]:
    """By how many versions the tokens are older than the weights that step starts with."""
    spoken = (s for t in trajectories for s in t.segments if s.origin is Origin.POLICY)
    return {step - version for segment in spoken for version, _ in segment.version_runs}


@pytest.mark.parametrize("staleness", range(5))
def test_what_a_step_trains_on_is_no_older_than_max_staleness(staleness: int) -> None:
    """Over 1,000 schedules in all: any delays, 1 to 3 replicas, weights at once, between turns or
    between batches, with and without dynamic sampling, tools that break. The bound is reached."""
    seen: set[int] = set()
    for seed in range(200):
        filters, broken = seed % 5 == 0, 0.1 * (seed % 7 == 0)
        with world(seed, staleness, with_filter=filters, broken=broken) as run:
            for step in range(1, 10):
                found = ages(step, run.step(step, ticks=seed % 50))
                assert found <= set(range(staleness + 1)), (seed, step)
                seen |= found
    assert seen == set(range(staleness + 1))


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_prompts_are_those_of_the_synchronous_run_in_its_order(staleness: int) -> None:
    """Nothing is discarded or doubled: same groups, rows and seeds for each step, whatever k."""
    for seed in range(20):
        with world(seed, 0) as first, world(seed, staleness) as second:
            for step in range(1, 10):
                taken = [[(t.group, t.sample, t.prompt.uid, t.seed) for t in run.step(step, 5)]
                         for run in (first, second)]  # fmt: skip
                assert taken[0] == taken[1]
            assert not second.collector.batches  # nothing was begun that no step takes


@dataclass
class Saved:
    """A checkpoint, as far as it is of sampling."""

    folder: Path
    state: list[Any]
    sampler: dict[str, Any]
    version: int

    @classmethod
    def of(cls, run: World, folder: Path, ticks: int = 20) -> Saved:
        run.group.run(ticks)  # while the last step is trained
        state, version = run.collector.state_dict(), run.replicas.version
        write = run.collector.writer(state, version)
        folder.mkdir(parents=True)
        if write is not None:
            write(folder)
        return cls(folder, state, run.collector.sampler.state_dict(), version)

    def resume(self, run: World) -> None:
        run.collector.sampler.load_state_dict(self.sampler)
        run.collector.load_state_dict(self.state, prefetched.read(self.folder), self.version)
        run.replicas.version = self.version - 1
        run.replicas.update_weights(run.folders)


@pytest.mark.parametrize("with_filter", [False, True])
def test_a_killed_run_takes_up_what_it_had_drawn(with_filter: bool, tmp_path: Path) -> None:
    """Every row is trained on as often as without the kills; no group is begun twice."""
    for seed in range(20):
        taken: list[Trajectory] = []
        saved: Saved | None = None
        for start in range(1, 10, 3):  # three processes, each killed in its fourth step
            with world(seed, staleness=2, with_filter=with_filter) as run:
                if saved is not None:
                    saved.resume(run)
                for step in range(start, start + 3):
                    taken += run.step(step)
                saved = Saved.of(run, tmp_path / f"{seed}/{start}")
                if start < 7:
                    run.collector.collect(start + 3, Timings())
        groups = Counter(t.group for t in taken)
        assert set(groups.values()) == {GROUP}
        if not with_filter:
            assert Counter(t.prompt.uid for t in taken if t.sample == 0) == undisturbed(seed)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (4, 4), (4, 1), (3, 0)])
def test_a_resumed_run_trains_on_what_was_finished(before: int, after: int, tmp_path: Path) -> None:
    """Not one of them is sampled again, and the bound holds, also for another max_staleness. Where
    there is time for all that is begun ahead, all of it is kept."""
    num_kept = num_all = 0
    for seed in range(20):
        with world(seed, before, broken=0.1 * (seed % 5 == 0)) as run:
            for step in range(1, 5):
                run.step(step, ticks=20)
            saved = Saved.of(run, tmp_path / str(seed), ticks=20 + 400 * (seed % 2))
        kept = prefetched.read(saved.folder)
        assert len(kept) == before * BATCH * GROUP or seed % 2 == 0 or seed % 5 == 0
        with world(seed, after, delays=seed + 99) as run:
            saved.resume(run)
            assert saved.version == 5
            for step in range(5, 5 + before):
                found = run.step(step, ticks=5)
                assert ages(step, found) <= set(range(after + 1)), (seed, step)
                for one in found:
                    row = kept.get((one.group, one.sample, False))
                    num_all += 1
                    if row is not None and min(row.versions) >= step - after:
                        assert one == row.to_trajectory(start_of(one))
                        num_kept += 1
    assert num_kept > num_all / 2 or before > after


def start_of(trajectory: Trajectory) -> Trajectory:
    """What it was begun from."""
    one = trajectory
    return start_trajectory(one.prompt, one.group, one.sample, one.seed)


@pytest.mark.parametrize("staleness", [0, 3])
def test_what_is_started_is_trained_on_or_counted(staleness: int, tmp_path: Path) -> None:
    """Tools that break some trajectories for good, and a kill: each epoch has every row once, less
    the groups that were left out, and those are the ones that the metrics count."""
    num_dropped = 0
    for seed in range(20):
        trained: list[Trajectory] = []
        saved: Saved | None = None
        counted = 0.0
        for first in (1, 5):
            with world(seed, staleness, num_steps=8, broken=0.4) as run:
                run.collector.config.trainer.max_lost_share = 0.99
                if saved is None:
                    run.replicas.update_weights(run.folders)
                else:
                    saved.resume(run)
                for step in range(first, first + 4):
                    samples, metrics = run.collector.collect(step, Timings())
                    trained += samples.trajectories
                    counted += metrics["fault/trajectories_dropped"]
                    run.replicas.update_weights(run.folders)
                saved = Saved.of(run, tmp_path / f"{seed}/{first}")
        assert set(Counter(t.group for t in trained).values()) == {GROUP}
        rows = Counter(t.prompt.uid for t in trained if t.sample == 0)
        missing = undisturbed(seed, num_steps=8) - rows
        assert rows <= undisturbed(seed, num_steps=8)
        assert missing.total() * GROUP == counted == 8 * BATCH * GROUP - len(trained)
        num_dropped += int(counted)
    assert num_dropped > 0


def undisturbed(seed: int, num_steps: int = 9) -> Counter[str]:
    """How often so many steps train on each row, from the order of the data alone."""
    sampler, rows = PromptSampler(NUM_ROWS, BATCH, seed=seed), prompts(NUM_ROWS)
    return Counter(rows[row].uid for _ in range(num_steps) for row in sampler.next_batch())


def told(trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], list[Any]]:
    """The tokens of each turn, and the weights of each stretch of them."""
    return {
        (t.group, t.sample): [
            (s.ids, s.version_runs) for s in t.segments if s.origin is Origin.POLICY
        ]
        for t in trajectories
    }


def test_a_recorded_schedule_is_repeated_whatever_takes_how_long(tmp_path: Path) -> None:
    """Each token by the weights that sampled it then: other delays change nothing, nor another
    number of replicas, and neither does that the recorded run was killed and resumed in its middle.
    Without the schedule they do. Turns that new weights cut are cut at the same tokens."""
    num_alike = num_cut = 0
    for seed in range(0, 60, 2):
        out, played = tmp_path / str(seed), list[Trajectory]()
        saved: Saved | None = None
        for first in (1, 5):
            with world(seed, staleness=2, out=out, delays=seed + first) as run:
                if saved is not None:
                    saved.resume(run)
                for step in range(first, first + 4):
                    played += run.step(step, ticks=11)
                saved = Saved.of(run, out / str(first))
        with world(
            seed, staleness=2, out=out / "b", replay=out, delays=seed + 99, num_replicas=2
        ) as run:
            again = [t for step in range(1, 9) for t in run.step(step, ticks=3)]
        with world(seed, staleness=2, out=out / "c", delays=seed + 99) as run:
            free = [t for step in range(1, 9) for t in run.step(step, ticks=3)]
        assert told(again) == told(played)
        num_alike += told(free) == told(played)
        num_cut += any(len(runs) > 1 for turns in told(played).values() for _, runs in turns)
    assert num_alike < 10 < num_cut


def test_after_a_rollback_nothing_comes_from_the_weights_that_collapsed() -> None:
    """What they sampled ahead is stopped, and sampled again by the weights that came back."""
    for seed in range(40):
        with world(seed, staleness=3) as run:
            for step in range(1, 4):
                run.step(step, ticks=3)
            run.collector.restart()
            run.replicas.update_weights(run.folders)  # the healthy ones
            healthy = run.replicas.version
            samples, _ = run.collector.collect(4, Timings())
            assert ages(healthy, samples.trajectories) == {0}


def test_files_of_weights_go_when_nobody_reads_them() -> None:
    """There are never more than those on their way and the newest, and in turns only one."""
    for staleness, most in ((0, 1), (3, 2)):
        with world(4, staleness) as run:
            for step in range(1, 8):
                run.step(step)
                assert len(run.folders.present) <= most
