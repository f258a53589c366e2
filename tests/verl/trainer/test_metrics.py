"""Metrics of a step, compared with values computed by hand."""

import time

import pytest
import torch

from verl.ext.guard import LENGTH_CLIP, MALFORMED, NO_ANSWER, TOOL_USE
from verl.monitor.performance import Timings
from verl.trainer.metrics import (
    behaviour_metrics,
    rollout_metrics,
    throughput_metrics,
)
from verl.types import Prompt, Status, TokenBatch, Trajectory

PROMPT = Prompt("q", (1,), "nq", ("a",))


def make_trajectory(status: Status, *counts: float) -> Trajectory:
    """Return a trajectory with the agent's counts: turns, calls, malformed and truncated turns."""
    names = ("turns", "valid_actions", "malformed_turns", "truncated_turns")
    stats = dict(zip(names, counts, strict=False))
    if "valid_actions" in stats:
        stats["answered"] = float(status is Status.ANSWERED)
        stats["valid_actions"] += stats["answered"]
    return Trajectory(PROMPT, [], status, stats)


def test_behaviour_is_counted_over_turns_and_trajectories() -> None:
    """Malformed and truncated by turn, calls and answers by trajectory, without failed ones."""
    trajectories = [
        make_trajectory(Status.ANSWERED, 3, 2, 0, 0),
        make_trajectory(Status.OUT_OF_TURNS, 4, 0, 3, 2),
        make_trajectory(Status.OUT_OF_BUDGET, 1, 1, 1, 0),
        make_trajectory(Status.FAILED, 9, 9, 9, 9),
    ]
    expected = {NO_ANSWER: 2 / 3, TOOL_USE: 2 / 3, MALFORMED: 4 / 8, LENGTH_CLIP: 2 / 8}
    assert behaviour_metrics(trajectories) == expected
    assert rollout_metrics(trajectories).items() >= expected.items()


def test_an_agent_without_such_counts_has_fewer_metrics() -> None:
    """The trainer does not derive counts that the agent does not report."""
    trajectories = [make_trajectory(Status.ANSWERED), make_trajectory(Status.OUT_OF_TURNS)]
    assert behaviour_metrics(trajectories) == {NO_ANSWER: 0.5}


def test_a_batch_of_failures_has_no_behaviour() -> None:
    """Failures of the infrastructure never look like a collapse."""
    assert behaviour_metrics([make_trajectory(Status.FAILED, 1)]) == {}


def test_parts_of_a_phase_do_not_count_twice() -> None:
    """The throughput divides by the seconds of phases, which include those of their parts."""
    timings = Timings()
    timings.seconds |= {"gen": 2.0, "update_weights": 1.0, "update_weights/load": 0.75}
    batch = TokenBatch(torch.tensor([0, 4, 12]))
    assert throughput_metrics(batch, timings, 1)["perf/throughput"] == pytest.approx(12 / 3)
    assert timings.metrics()["timing_s/update_weights/load"] == 0.75


def test_tokens_of_a_gpu_are_over_the_whole_step() -> None:
    """Time between the phases counts too, and tokens are divided by the number of GPUs."""
    timings, batch = Timings(), TokenBatch(torch.tensor([0, 4, 12]))
    time.sleep(0.02)
    earlier = timings.elapsed
    found = throughput_metrics(batch, timings, 3)["perf/tokens_per_second_per_gpu"]
    assert 12 / 3 / timings.elapsed < found < 12 / 3 / earlier
