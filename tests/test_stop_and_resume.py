"""A real run that is asked to stop saves, ends with status 75, and can be continued."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.compare import read_rows
from tests.test_end_to_end import ROOT, command_of
from verl.checkpoint import folders
from verl.errors import Interrupted

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

OPTIONS = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2", "trainer.save_freq=-1",
           "trainer.total_training_steps=3", "trainer.val_before_train=false",
           "trainer.resume_mode=auto"]  # fmt: skip
COMPARED = ("actor/pg_loss", "actor/grad_norm", "response_length/mean", "perf/total_num_tokens")


def start(world: dict[str, str], out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of(world, out, *OPTIONS), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def end(run: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = run.communicate(timeout=590)
    return run.returncode, text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_line_24_a_stopped_run_goes_on_as_if_never_stopped(
    world: dict[str, str], tmp_path: Path, number: int
) -> None:
    """A run that is stopped anywhere after its first step and started again has the same steps."""
    status, text = end(start(world, tmp_path / "whole"))
    assert status == 0, text[-3000:]
    run = start(world, tmp_path / "stopped")
    while not read_rows(tmp_path / "stopped/metrics.jsonl") and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(number)
    status, text = end(run)
    assert status == Interrupted.exit_code, text[-3000:]
    assert "resume_mode=auto" in text
    assert folders.latest(tmp_path / "stopped") is not None
    status, text = end(start(world, tmp_path / "stopped"))
    assert status == 0, text[-3000:]
    whole, both = (
        read_rows(tmp_path / "whole/metrics.jsonl"),
        read_rows(tmp_path / "stopped/metrics.jsonl"),
    )
    assert [row["step"] for row in both] == [row["step"] for row in whole] == [1, 2, 3]
    for expected, found in zip(whole, both, strict=True):
        for name in COMPARED:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
