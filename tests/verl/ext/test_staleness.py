"""Asynchronous sampling: the bound on staleness, resuming, schedules, and that nothing is lost."""

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
import torch

from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.recording import prompts
from verl.agent.dialogue import _policy_segment
from verl.agent.environment import Environment
from verl.batch import TokenBatch
from verl.checkpoint.folders import RunState
from verl.config import Config
from verl.data.sampler import PromptSampler
from verl.errors import ConfigError
from verl.ext import ahead_files
from verl.ext.asynchrony import AheadCollector
from verl.ext.overlapping import check_engines_apart
from verl.ext.replay import FOLDER
from verl.ext.retry import RetryingRollout
from verl.ext.staleness import staleness_metrics
from verl.monitor.performance import Timings
from verl.rewards.interface import EachAlone, Reward
from verl.rollout.interface import RolloutEngine
from verl.rollout.replicas import RolloutReplicas
from verl.trainer.build import replica_class, replicas_class
from verl.types import Completion, Origin, Sampling, Status, Trajectory, start_trajectory
from verl.weights.files import Engines, Transport

pytestmark = pytest.mark.asynchrony
NUM_ROWS, BATCH, GROUP = 8, 3, 2


@dataclass
class Folders(Transport):
    """Files without ranks: the versions that exist."""

    present: set[int] = field(default_factory=set)

    def send(self, ranks: object, engines: Engines, version: int) -> dict[str, float]:
        assert set(engines.loading) <= self.present
        self.present = {*engines.loading, version}
        engines.load(["folder"] * len(engines.group), version)
        return {}

    def resend(self, engines: Engines) -> None:
        raise NotImplementedError


class TickingEngine(RolloutEngine):
    """An engine with random delays, whose tokens depend on weights, seed and position."""

    takes_weights = True

    def __init__(self, draw: random.Random, folders: Folders) -> None:
        self._draw, self._folders = draw, folders
        self.weight_version, self.num_running = 0, 0

    async def _delay(self, max_ticks: int = 12) -> None:
        for _ in range(self._draw.randrange(max_ticks)):
            await asyncio.sleep(0)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        version = self.weight_version
        source = random.Random(f"{version} {sampling.seed}")
        ids: list[int] = []
        self.num_running += 1
        try:
            while len(ids) < sampling.max_tokens:
                await self._delay(max_ticks=5)
                ids.append(source.randrange(1000))
        finally:
            self.num_running -= 1
        assert self.weight_version == version, "weights changed during a request"
        return Completion(tuple(ids), (-1.0,) * len(ids), "x" * len(ids), "length", version)

    async def update_weights(self, folder: str, version: int) -> None:
        for _ in range(2):
            assert version in self._folders.present, "its files were removed while they were read"
            assert self.num_running == 0
            await self._delay()
        self.weight_version = version


class TurningAgent:
    """An agent with one to three turns and a slow tool between them; some trajectories fail."""

    def __init__(self, draw: random.Random, failed_share: float = 0.0) -> None:
        self._draw, self._failed_share = draw, failed_share

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        segments, planned = list(start.segments), random.Random(start.seed)
        for turn in range(planned.randint(1, 3)):
            request = Sampling(planned.randint(1, 4), seed=start.seed and start.seed + turn)
            segments.append(_policy_segment(await engine.generate((1,), request)))
            for _ in range(self._draw.randrange(9)):
                await asyncio.sleep(0)
        is_failed = self._draw.random() < self._failed_share
        status = Status.FAILED if is_failed else Status.ANSWERED
        return replace(start, segments=segments, status=status)


@dataclass
class World:
    """A run without ranks: what is sampled for each step, and the weights after it."""

    collector: AheadCollector
    replicas: RolloutReplicas
    group: LocalGroup
    folders: Folders

    def send(self) -> None:
        """Send the next version of the weights."""
        self.replicas.update_weights(self.folders, self.replicas.version + 1)

    def step(self, number: int, ticks: int = 0) -> list[Trajectory]:
        """Collect a step's trajectories, and train for `ticks` iterations of the loop."""
        if self.replicas.version == 0:
            self.send()
        samples, _ = self.collector.collect(number, Timings())
        self.group.run(ticks)
        self.send()
        return samples.trajectories


@contextmanager
def world(
    seed: int, staleness: int, num_steps: int = 9, with_filter: bool = False,
    failed_share: float = 0.0, out: Path | None = None, replay: Path | None = None,
    delays: int | None = None, num_replicas: int | None = None,
) -> Iterator[World]:  # fmt: skip
    """Set up sampling; `seed` determines the options, prompts and, without `delays`, the timing."""
    draw, config, folders = random.Random(seed if delays is None else delays), Config(), Folders()
    stack = ExitStack()
    out = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config.trainer.default_local_dir = str(out)
    config.actor_rollout_ref.model.path = "nowhere"
    rollout = config.actor_rollout_ref.rollout
    rollout.max_staleness, rollout.partial, rollout.n_agent = staleness, seed % 2 == 0, GROUP
    rollout.replay = None if replay is None else str(replay / FOLDER)
    config.data.train_batch_size, config.trainer.max_lost_share = BATCH, 0.5
    config.algorithm.filter_groups.enable = with_filter
    config.algorithm.filter_groups.max_num_gen_batches = 3
    hosts = []
    for number in range(num_replicas or 1 + seed % 3):
        hosts.append(
            replica_class(config)(config, lambda _: TurningAgent(draw, failed_share), number)
        )
        hosts[-1].engine = TickingEngine(draw, folders)
    group: Any = LocalGroup(hosts, draw)
    replicas = replicas_class(config)(group, folders)
    collector = AheadCollector(
        config, RetryingRollout(replicas, Environment()), prompts(NUM_ROWS),
        PromptSampler(NUM_ROWS, BATCH, seed=seed), EachAlone(lambda t: Reward(draw.random() > 0.6)),
        last_step=num_steps, fetch_finished=replicas.fetch_finished,
    )  # fmt: skip
    with stack:
        yield World(collector, replicas, group, folders)
        group.close()


def ages(step: int, trajectories: Sequence[Trajectory]) -> set[int]:
    """Return how many versions the tokens are older than the weights at the start of the step."""
    segments = (s for t in trajectories for s in t.segments if s.origin is Origin.POLICY)
    return {step - segment.weight_version for segment in segments}


@pytest.mark.parametrize("staleness", range(5))
def test_a_step_trains_on_tokens_no_older_than_max_staleness(staleness: int) -> None:
    """In 200 random worlds, no token is older than the bound, which is tight."""
    assert_bounded(staleness, range(40))


def assert_bounded(staleness: int, seeds: Sequence[int]) -> None:
    """Check the bound in worlds with any timing, 1 to 3 replicas, failures and dynamic sampling.

    Weights are loaded between turns or between trajectories.
    """
    seen: set[int] = set()
    for seed in seeds:
        filters, failed_share = seed % 5 == 0, 0.1 * (seed % 7 == 0)
        with world(seed, staleness, with_filter=filters, failed_share=failed_share) as run:
            for step in range(1, 10):
                found = ages(step, run.step(step, ticks=seed % 50))
                assert found <= set(range(staleness + 1)), (seed, step)
                seen |= found
    assert seen == set(range(staleness + 1))


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_prompts_are_those_of_the_synchronous_run_in_order(staleness: int) -> None:
    """Each step has the same groups, rows and seeds for any staleness."""
    for seed in range(20):
        with world(seed, 0) as first, world(seed, staleness) as second:
            for step in range(1, 10):
                taken = [[(t.group, t.sample, t.prompt.uid, t.seed) for t in run.step(step, 5)]
                         for run in (first, second)]  # fmt: skip
                assert taken[0] == taken[1]
            assert not second.collector.batches  # nothing was started that no step takes


@dataclass
class Saved:
    """The sampling state of a checkpoint."""

    folder: Path
    state: RunState

    @classmethod
    def of(cls, run: World, folder: Path, ticks: int = 20) -> Saved:
        run.group.run(ticks)  # while the last step is trained
        fields = run.collector.state_dict()
        fields |= {"step": 0, "kl_coef": 0.0, "version": run.replicas.version}
        state = RunState.of(fields)
        write = run.collector.file_writer(state)
        folder.mkdir(parents=True)
        if write is not None:
            write(folder)
        return cls(folder, state)

    def resume(self, run: World) -> None:
        run.collector.load_checkpoint(self.state, self.folder)
        run.replicas.version = self.state.next_version - 1
        run.send()


@pytest.mark.parametrize("with_filter", [False, True])
def test_line_24_a_killed_run_resumes_the_batches_it_had_drawn(
    with_filter: bool, tmp_path: Path
) -> None:
    """Every row is trained on as often as without the kills; no group is trained on twice."""
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
def test_a_resumed_run_uses_finished_trajectories(before: int, after: int, tmp_path: Path) -> None:
    """Finished trajectories are not sampled again, and the bound holds for another max_staleness.

    If there was time to finish all trajectories that were started ahead of time, all are kept.
    """
    num_kept = num_all = 0
    for seed in range(20):
        with world(seed, before, failed_share=0.1 * (seed % 5 == 0)) as run:
            for step in range(1, 5):
                run.step(step, ticks=20)
            saved = Saved.of(run, tmp_path / str(seed), ticks=20 + 400 * (seed % 2))
        kept = ahead_files.read(saved.folder)
        assert len(kept) == before * BATCH * GROUP or seed % 2 == 0 or seed % 5 == 0
        with world(seed, after, delays=seed + 99) as run:
            saved.resume(run)
            assert saved.state.version == 5
            for step in range(5, 5 + before):
                trajectories = run.step(step, ticks=5)
                assert ages(step, trajectories) <= set(range(after + 1)), (seed, step)
                for trajectory in trajectories:
                    saved_one = kept.get((trajectory.group, trajectory.sample))
                    num_all += 1
                    if saved_one is not None and min(saved_one.versions) >= step - after:
                        assert trajectory == saved_one.to_trajectory(start_of(trajectory))
                        num_kept += 1
    assert num_kept > num_all / 2 or before > after


def test_batches_of_other_rows_are_not_resumed(tmp_path: Path) -> None:
    """With more data, accepted by name, what was drawn ahead is dropped: its rows are no longer."""
    with world(0, staleness=2) as run:
        run.step(1)
        saved = Saved.of(run, tmp_path / "saved")
    saved.state = saved.state.changed({"sampler": {**saved.state.sampler, "num_rows": 99}})
    with world(0, staleness=2) as run:
        run.collector.config.trainer.resume_anyway = ["data"]
        saved.resume(run)
        assert not run.collector.batches
        first = PromptSampler(NUM_ROWS, BATCH, seed=0).next_batch()
        uids = [prompts(NUM_ROWS)[row].uid for row in first]
        assert [t.prompt.uid for t in run.step(2) if t.sample == 0] == uids


def start_of(trajectory: Trajectory) -> Trajectory:
    """Return the started trajectory from which a trajectory was sampled."""
    prompt, group = trajectory.prompt, trajectory.group
    return start_trajectory(prompt, group, trajectory.sample, trajectory.seed)


@pytest.mark.parametrize("staleness", [0, 3])
def test_every_started_group_is_trained_on_or_counted(staleness: int, tmp_path: Path) -> None:
    """With permanent failures and a kill, each epoch has every row once, except for dropped groups.

    The metrics count the dropped groups.
    """
    num_dropped = 0
    for seed in range(20):
        trained: list[Trajectory] = []
        saved: Saved | None = None
        counted = 0.0
        for first in (1, 5):
            with world(seed, staleness, num_steps=8, failed_share=0.4) as run:
                run.collector.config.trainer.max_lost_share = 0.99
                if saved is None:
                    run.send()
                else:
                    saved.resume(run)
                for step in range(first, first + 4):
                    samples, metrics = run.collector.collect(step, Timings())
                    trained += samples.trajectories
                    counted += metrics["fault/trajectories_dropped"]
                    run.send()
                saved = Saved.of(run, tmp_path / f"{seed}/{first}")
        assert set(Counter(t.group for t in trained).values()) == {GROUP}
        rows = Counter(t.prompt.uid for t in trained if t.sample == 0)
        missing = undisturbed(seed, num_steps=8) - rows
        assert rows <= undisturbed(seed, num_steps=8)
        assert missing.total() * GROUP == counted == 8 * BATCH * GROUP - len(trained)
        num_dropped += int(counted)
    assert num_dropped > 0


def undisturbed(seed: int, num_steps: int = 9) -> Counter[str]:
    """Return how often `num_steps` steps train on each row, from the order of the data alone."""
    sampler, rows = PromptSampler(NUM_ROWS, BATCH, seed=seed), prompts(NUM_ROWS)
    return Counter(rows[row].uid for _ in range(num_steps) for row in sampler.next_batch())


def turns_of(trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], list[Any]]:
    """Return the tokens and version of each turn, by trajectory."""
    return {
        (t.group, t.sample): [
            (s.ids, s.weight_version) for s in t.segments if s.origin is Origin.POLICY
        ]
        for t in trajectories
    }


def test_a_recorded_schedule_is_repeated_with_any_timing(tmp_path: Path) -> None:
    """Each token is sampled by the recorded weights.

    This holds whatever the timing and the number of replicas, and although the recorded run was
    killed and resumed. Without the schedule, timing makes a difference.
    """
    num_equal = 0
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
        assert turns_of(again) == turns_of(played)
        num_equal += turns_of(free) == turns_of(played)
    assert num_equal < 10


def test_weight_files_are_removed_when_nobody_reads_them() -> None:
    """Only the newest version and those being loaded are kept; without overlap only one."""
    for staleness, max_versions in ((0, 1), (3, 2)):
        with world(4, staleness) as run:
            for step in range(1, 8):
                run.step(step)
                assert len(run.folders.present) <= max_versions


def test_staleness_is_counted_in_versions_of_policy_tokens() -> None:
    """Prompt and observation tokens have no version; shares are of policy tokens."""
    mask = torch.tensor([False, True, True, True, False, True])
    versions = torch.tensor([0, 4, 5, 5, 0, 5], dtype=torch.int32)
    columns = {"policy_mask": mask, "weight_versions": versions}
    assert staleness_metrics(TokenBatch(torch.tensor([0, 3, 6]), columns), 5) == {
        "rollout/staleness/mean": 0.25,
        "rollout/staleness/share_0": 0.75,
        "rollout/staleness/share_1": 0.25,
    }


def test_engines_that_share_gpus_cannot_sample_ahead_of_time() -> None:
    """They sleep while the ranks train; on CPU, or on their own GPUs, they do not."""
    config = Config()
    config.actor_rollout_ref.rollout.max_staleness, config.trainer.device = 2, "cuda"
    with pytest.raises(ConfigError, match=r"max_staleness"):
        check_engines_apart(config, {})
    config.trainer.device = "cpu"
    check_engines_apart(config, {})
    config.trainer.device, config.trainer.rollout_gpus = "cuda", 1
    check_engines_apart(config, {})
    config.trainer.rollout_gpus = 0
    config.actor_rollout_ref.rollout.url = ["http://a:1"]  # a server has its own GPUs
    check_engines_apart(config, {})
