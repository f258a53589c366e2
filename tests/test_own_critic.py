"""PPO by the real trainer with the critic on separate ranks gives the same run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.compare import differences, read_rows, same_weights
from tests.test_end_to_end import ROOT, command_of, train
from tests.test_failures import wait_until
from tests.verl.trainer.documented import undocumented

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow]

PPO = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=1", "trainer.deterministic=true",
       "trainer.total_training_steps=3", "trainer.test_freq=0", "trainer.val_before_train=false",
       "critic.ppo_epochs=2")  # fmt: skip
APART = "critic.n_gpus_per_node=1"


def test_a_critic_apart_is_the_shared_run_bit_for_bit(
    world: dict[str, str], tmp_path: Path
) -> None:
    """All metrics but times, and the weights, are equal; so is a resumed run on shared ranks."""
    shared, apart, rest = (tmp_path / name for name in ("shared", "apart", "rest"))
    rows = train(world, shared, *PPO, "trainer.save_freq=0")
    found = train(world, apart, *PPO, "trainer.save_freq=2", "trainer.trace=true", APART)
    assert list(differences(rows, found)) == []
    assert same_weights(shared / "model", apart / "model")
    assert undocumented({name for row in found for name in row} - {"step"}) == []
    for row in found:
        assert row["timing_s/update_critic"] > 0 and row["timing_s/values"] > 0
    trace = json.loads((apart / "trace.json").read_text().rstrip().rstrip(",") + "]")
    named = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {"rank 0", "critic rank 0"} <= named
    resumed = train(
        world, rest, *PPO, "trainer.save_freq=0", f"trainer.resume_mode={apart / 'global_step_2'}"
    )
    assert list(differences(read_rows(shared / "metrics.jsonl")[-1:], resumed)) == []
    assert same_weights(shared / "model", rest / "model")


def test_a_lost_rank_of_the_critic_starts_the_run_again(
    world: dict[str, str], tmp_path: Path
) -> None:
    """The run restarts from its last checkpoint and names the rank, which has its own core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("actor and critic share one core")
    with (tmp_path / "log").open("w") as log:
        options = (*PPO, APART, "trainer.save_freq=1", "trainer.total_training_steps=4")
        command = command_of(world, tmp_path / "run", *options)
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        wait_until(lambda: bool(read_rows(tmp_path / "run/metrics.jsonl")))
        last = cores[len(cores) // 2 :]
        ranks = [
            process
            for process in psutil.Process(run.pid).children(recursive=True)
            if "ActorHost" in process.name() and process.cpu_affinity() == last
        ]
        assert len(ranks) == 1
        ranks[0].kill()
        assert run.wait(300) == 0
    finally:
        run.kill()
    said, rows = (tmp_path / "log").read_text(), read_rows(tmp_path / "run/metrics.jsonl")
    assert "critic rank 0 on node" in said and "the run starts again from" in said
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["fault/run_restarts"] == 1
