"""Guarantees of asynchronous runs, with a real rank and real engines, bit for bit in float32."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.compare import is_computed, same_weights
from tests.verl.trainer.local_run import (
    PROMPTS,
    TalkingAgent,
    local_ranks,
    run_config,
    score,
    start_engine,
    train,
)
from tests.verl.training.ranks import save_tiny
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.data.sampler import PromptSampler
from verl.ext import guard
from verl.ext.replay import FOLDER
from verl.monitor.performance import Timings
from verl.trainer.collect import Samples, trajectory_seed
from verl.trainer.learn import Learner, add_advantages, assemble
from verl.trainer.metrics import advantage_metrics, reward_metrics, rollout_metrics
from verl.types import Metrics, Sampling, Trajectory, start_trajectory

pytestmark = pytest.mark.asynchrony

ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-2"],
}
NUM_STEPS = 3
Plain = Callable[[str], tuple[list[Metrics], Path]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the policy that all runs start from."""
    return save_tiny(tmp_path_factory.mktemp("model"))


def plain_loop(config: Config, num_steps: int) -> list[Metrics]:
    """Run the synchronous algorithm in a plain loop, as the oracle for the trainer.

    Uses neither collector, replicas nor trainer. The weights are written to `model/`.
    """
    seed, folder = config.trainer.seed, Path(config.trainer.default_local_dir)
    engine, agent = start_engine(config, random.Random(0)), TalkingAgent(random.Random(0))
    sampler = PromptSampler(len(PROMPTS), config.data.train_batch_size, seed=seed)
    size, kl = config.actor_rollout_ref.rollout.n_agent, FixedKLController(0.01)
    sampling, rows = Sampling(config.data.max_response_length), []

    async def play(starts: Sequence[Trajectory]) -> list[Trajectory]:
        return [await agent.run(start, engine, sampling) for start in starts]

    with local_ranks(config, num_steps) as ranks:
        learner = Learner(config, ranks, kl)
        for step in range(1, num_steps + 1):
            ranks.save_policy(folder / "model", "float32")
            asyncio.run(engine.update_weights(str(folder / "model"), step))
            trajectories = asyncio.run(play([
                start_trajectory(
                    PROMPTS[row], f"{step}/{position}", n, trajectory_seed(seed, step, position, n)
                )
                for position, row in enumerate(sampler.next_batch()) for n in range(size)
            ]))  # fmt: skip
            rewards = [score(trajectory) for trajectory in trajectories]
            batch = assemble(Samples(trajectories, rewards), config)
            learner.prepare(batch, Timings())
            metrics = add_advantages(batch, config, kl) | advantage_metrics(batch)
            metrics |= learner.update(batch, step, Timings())
            metrics |= rollout_metrics(trajectories) | reward_metrics(rewards)
            metrics |= guard.measure(trajectories)
            metrics["perf/total_num_tokens"] = float(batch.num_tokens)
            rows.append(metrics)
        ranks.save_policy(folder / "model", "float32")
    return rows


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Returns the metrics and the folder of an algorithm's plain loop, which runs once."""

    @cache
    def result(algorithm: str) -> tuple[list[Metrics], Path]:
        out = tmp_path_factory.mktemp(algorithm)
        return plain_loop(run_config(model, out, *ALGORITHMS[algorithm]), NUM_STEPS), out

    return result


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_line_22_without_staleness_a_run_is_the_plain_loop(
    model: str, plain: Plain, algorithm: str, num_replicas: int, tmp_path: Path
) -> None:
    """Every metric of every step, and the trained weights, are equal whatever the delays."""
    config = run_config(model, tmp_path, *ALGORITHMS[algorithm])
    rows = train(config, NUM_STEPS, delays=num_replicas, num_replicas=num_replicas)
    expected, folder = plain(algorithm)
    fresh = {"rollout/staleness/mean": 0.0, "rollout/staleness/share_0": 1.0}
    assert computed(rows) == [row | fresh for row in expected]
    assert same_weights(folder / "model", tmp_path / "model")
    assert len({row["actor/grad_norm"] for row in rows}) == NUM_STEPS


def test_a_schedule_cut_by_a_kill_gives_the_same_weights(model: str, tmp_path: Path) -> None:
    """Recorded with a kill and a resume, replayed without, and with other delays and replicas."""
    num_steps, out = 6, tmp_path / "recorded"
    options = [*ALGORITHMS["ppo"], "actor_rollout_ref.rollout.max_staleness=2"]
    saving = run_config(model, out, *options, "trainer.save_freq=2", "trainer.resume_mode=auto")
    train(saving, num_steps, delays=1, num_replicas=2, killed_in=4)
    resumed = train(saving, num_steps, delays=2, num_replicas=2)
    assert len(resumed) == 4  # from the checkpoint of step 2
    replay = f"actor_rollout_ref.rollout.replay={out / FOLDER}"
    replayed = train(run_config(model, tmp_path / "again", *options, replay), num_steps, delays=3)
    free = train(run_config(model, tmp_path / "free", *options), num_steps, delays=3)
    assert computed(resumed) == computed(replayed[2:]) != computed(free[2:])
    assert same_weights(out / "model", tmp_path / "again" / "model")
    assert not same_weights(out / "model", tmp_path / "free" / "model")
    prefix = "rollout/staleness/share_"
    shares = [x for row in resumed for name, x in row.items() if name.startswith(prefix)]
    assert any(0 < share < 1 for share in shares)  # some batches have tokens of several versions


def computed(rows: Sequence[Metrics]) -> list[Metrics]:
    """Return the metrics that depend on neither time nor machine."""
    return [{name: x for name, x in row.items() if is_computed(name)} for row in rows]
