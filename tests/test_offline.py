"""Training on a recorded run repeats it with the real command, bit for bit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.compare import differences, read_rows, same_weights
from tests.test_end_to_end import ROOT, command_of, start_world, train

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow]

PPO = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "trainer.save_freq=2",
       "trainer.val_before_train=false", "trainer.test_freq=0")  # fmt: skip


def offline(out: Path, rollouts: Path, model: str, *options: str) -> list[str]:
    """Return the command of a run without questions and with a retriever that never answers."""
    nowhere = {"rows": "no-such.parquet", "url": "http://127.0.0.1:9", "model": model}
    return command_of(nowhere, out, *PPO, f"data.rollouts={rollouts}", *options)


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def computed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without metrics of waits and those that only an engine reports."""
    told = ("rollout/wait_s", "rollout/prefix_hit_share")
    return [{k: v for k, v in row.items() if not k.startswith(told)} for row in rows]


def test_offline_steps_are_the_recorded_ones(tmp_path: Path) -> None:
    """Training on a record repeats the recorded run: three steps of PPO on two ranks.

    The third step is also repeated from a checkpoint of the recorded run. Where two ranks compute
    each dialogue together, results are equal but for rounding. A record that was cut is refused
    with status 2 and one line, before Ray starts.
    """
    with start_world(tmp_path) as world:
        recorded, rollouts = tmp_path / "recorded", tmp_path / "rollouts"
        last = "trainer.total_training_steps=3"
        train(world, recorded, *PPO, last, f"trainer.rollout_data_dir={rollouts}")
        model = world["model"]
    first = computed(read_rows(recorded / "metrics.jsonl"))
    for out, start in (("whole", []), ("rest", [f"{recorded / 'global_step_2'}"])):
        resume = [f"trainer.resume_mode={folder}" for folder in start]
        resume += ["trainer.resume_anyway=[data,validation,corpus,index]"] if start else []
        done = run(offline(tmp_path / out, rollouts, model, *resume))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        rows = computed(read_rows(tmp_path / out / "metrics.jsonl"))
        assert [row["step"] for row in rows] == ([3] if start else [1, 2, 3])
        expected = [row for row in first if row["step"] in {one["step"] for one in rows}]
        assert list(differences(expected, rows)) == []
        assert same_weights(recorded / "model", tmp_path / out / "model")
    together = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    done = run(offline(tmp_path / "grouped", rollouts, model, together))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for row, expected in zip(read_rows(tmp_path / "grouped/metrics.jsonl"), first, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key
    path = rollouts / "step_00000002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    done = run(offline(tmp_path / "cut", rollouts, model))
    assert done.returncode == 2 and "the 4 that the step had" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
