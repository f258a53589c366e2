"""The trajectories that a step trains on: dynamic sampling, and failed trajectories."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.recording import RecordingReplicas, prompts, score_by_sample
from verl.agent.environment import Environment
from verl.checkpoint.folders import RunState
from verl.config import Config
from verl.data.sampler import PromptSampler
from verl.errors import ConfigError, ToolOutage
from verl.ext.retry import MAX_VAIN_ROUNDS, RetryingRollout
from verl.monitor.performance import Timings
from verl.rewards.interface import EachAlone, Reward, RewardFn
from verl.trainer.collect import RolloutCollector, num_further_prompts
from verl.types import Trajectory


def make_collector(
    replicas: RecordingReplicas, reward: RewardFn = score_by_sample
) -> RolloutCollector:
    config = Config()
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = 3
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = 3
    sampler = PromptSampler(8, 4, shuffle=True, seed=0)
    rollout = RetryingRollout(replicas, Environment())
    return RolloutCollector(config, rollout, prompts(8), sampler, EachAlone(reward))


def score_hotpotqa_only(trajectory: Trajectory) -> Reward:
    """Score 0 for all samples of nq; samples of hotpotqa have different scores."""
    is_hotpotqa = trajectory.prompt.data_source == "hotpotqa"
    return Reward(float(is_hotpotqa and trajectory.sample == 1))


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ() -> None:
    """Groups of equal scores are replaced by further prompts; no group is cut or repeated."""
    collector = make_collector(RecordingReplicas([]), score_hotpotqa_only)
    samples, metrics = collector.collect(1, Timings())
    groups = Counter(t.group for t in samples.trajectories)
    assert set(groups.values()) == {3} and len(groups) == metrics["rollout/kept_groups"] == 4
    assert {t.prompt.data_source for t in samples.trajectories} == {"hotpotqa"}
    assert [r.score for r in samples.rewards] == [t.sample == 1 for t in samples.trajectories]
    assert 2 <= metrics["rollout/gen_batches"] <= 3
    assert metrics["critic/score/mean"] == pytest.approx(1 / 6, abs=0.1)


def test_dynamic_sampling_ends() -> None:
    """If all scores are equal, a step samples max_num_gen_batches batches and uses one of them.

    Using all of them would make more updates than the step has old log-probs for.
    """
    replicas = RecordingReplicas([])
    samples, metrics = make_collector(replicas, lambda t: Reward(0.0)).collect(1, Timings())
    assert (len(replicas.requests), metrics["rollout/kept_groups"]) == (3, 0)
    assert len(samples.trajectories) == len(samples.rewards) == 12
    assert set(Counter(t.group for t in samples.trajectories).values()) == {3}
    seeds = [t.seed for starts, _ in replicas.requests for t in starts]
    assert len(set(seeds)) == 36


def test_further_prompts_are_those_that_are_probably_missing() -> None:
    """The missing groups and a standard deviation, at the share that was live until now.

    By simulation: three of four further samplings suffice, at every share and size.
    """
    assert [num_further_prompts(12, live, 12) for live in (0, 1, 6, 10, 11)] == [12, 12, 12, 5, 3]
    generator = np.random.default_rng(0)
    for size in (8, 64, 512):
        for share in (0.5, 0.7, 0.9):
            num_live = int(share * size)
            further = num_further_prompts(size, num_live, size)
            found = generator.binomial(further, share, 2000)
            assert further == size or (found >= size - num_live).mean() > 0.75
            assert further <= (size - num_live) / share + size**0.5 / share + 1


def collect_steps(
    steps: range, state: dict[str, Any] | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the rows that each request sampled, and the state afterwards; uid 3 is never live."""
    replicas = RecordingReplicas([])

    def score(trajectory: Trajectory) -> Reward:
        return Reward(float(trajectory.sample == 1 and trajectory.prompt.uid != prompts(8)[3].uid))

    collector = make_collector(replicas, score)
    if state is not None:
        sampler = state.pop("sampler")
        collector.load_checkpoint(RunState(0, sampler, 0.0, others=state), Path())
    for step in steps:
        _, metrics = collector.collect(step, Timings())
        assert metrics["rollout/kept_groups"] == 4
    sampled = [[t.prompt.uid for t in starts if t.sample == 0] for starts, _ in replicas.requests]
    return sampled, json.loads(json.dumps(collector.state_dict()))


def test_other_rows_that_were_accepted_begin_with_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rows that were drawn before a resume with more data are those of no row now."""
    collector, fresh = (make_collector(RecordingReplicas([])) for _ in range(2))
    position = {"epoch": 2, "position": 4, "num_rows": 9, "batch_size": 4}
    state = RunState(3, position, 0.0, others={"drawn": [8, 1]})
    with pytest.raises(ConfigError, match=r"got 8 num_rows, expected 9; .*resume_anyway=\[data\]"):
        collector.load_checkpoint(state, Path())
    collector.config.trainer.resume_anyway = ["validation", "data"]
    collector.load_checkpoint(state, Path())
    assert "8 rows instead of the checkpoint's 9" in caplog.text
    assert collector.state_dict() == fresh.state_dict() and collector.draw(6) == fresh.draw(6)
    state = RunState.of({"step": 4, "kl_coef": 0.0, **collector.state_dict()})
    resumed = make_collector(RecordingReplicas([]))
    resumed.config.trainer.resume_anyway = ["data"]
    resumed.load_checkpoint(state, Path())  # the option is left as it is
    assert resumed.state_dict() == collector.state_dict() and resumed.draw(6) == fresh.draw(6)


def test_dynamic_sampling_uses_every_row_in_the_order_of_the_data() -> None:
    """Rows that were drawn with those that were missing come next, also after a checkpoint."""
    whole, _ = collect_steps(range(1, 13))
    first, state = collect_steps(range(1, 6))
    second, _ = collect_steps(range(6, 13), state)
    assert first + second == whole
    assert {len(rows) for rows in whole} == {3, 4}
    flat = [uid for rows in whole for uid in rows]
    sampler = PromptSampler(8, 4, shuffle=True, seed=0)
    order = [prompts(8)[row].uid for _ in flat for row in sampler.next_batch()]
    assert flat == order[: len(flat)]


@pytest.mark.parametrize("fails", ["1/1", "1/4"])
def test_losses_are_shares_of_the_step_in_every_round(fails: str) -> None:
    """A lost group is one of five of the step, though of a further round it is a third."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: (start.group, start.sample) == (fails, 0)
    collector = make_collector(
        replicas, lambda t: Reward(float(t.sample == 1 and t.group != "1/0"))
    )
    collector.config.trainer.max_lost_share = 0.25
    samples, metrics = collector.collect(1, Timings())
    assert metrics["fault/trajectories_dropped"] == 3
    assert fails not in {t.group for t in samples.trajectories}
    assert len(replicas.requests[0][0]) == 12


PERMANENTLY = 10_000
FAILURES = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from([1, 2, MAX_VAIN_ROUNDS, PERMANENTLY]),
    max_size=6,
)
"""Number of rounds in which a trajectory fails, by group and sample."""


@given(failures=FAILURES, max_share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_after_any_failures_a_step_has_complete_groups_only(
    failures: dict[tuple[int, int], int], max_share: float
) -> None:
    """Trajectories that failed temporarily are used; permanent failures remove their group.

    A step that would lose more than the allowed share raises an error.
    """
    left = {(f"1/{g}", s): n for (g, s), n in failures.items()}
    lost = {group for (group, _), num_rounds in left.items() if num_rounds == PERMANENTLY}
    replicas = RecordingReplicas([])

    def fail(start: Trajectory) -> bool:
        key = (start.group, start.sample)
        left[key] = left.get(key, 0) - 1
        return left[key] >= 0

    replicas.fail = fail
    collector = make_collector(replicas)
    collector.config.algorithm.filter_groups.enable = False
    collector.config.trainer.max_lost_share = max_share
    if lost and (len(lost) == 4 or len(lost) / 4 > max_share):
        limit = f"trainer.max_lost_share={max_share:g}"
        with pytest.raises(
            ToolOutage, match=rf"step 1: .*: down; {3 * len(lost)} of 12 .* {limit}"
        ):
            collector.collect(1, Timings())
        return
    samples, metrics = collector.collect(1, Timings())
    kept = Counter(t.group for t in samples.trajectories)
    assert kept == {f"1/{g}": 3 for g in range(4) if f"1/{g}" not in lost}
    assert len(samples.rewards) == len(samples.trajectories)
    assert metrics["fault/trajectories_dropped"] == 3 * len(lost)
