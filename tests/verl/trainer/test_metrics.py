"""Metrics of a step, compared with values computed by hand."""

import time

import pytest
import torch

from verl.batch import TokenBatch
from verl.monitor.performance import Timings
from verl.trainer.metrics import throughput_metrics


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
