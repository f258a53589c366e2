"""The runner of the GPU checks: a failing check affects neither the others nor the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from scripts.gpu_checks import train
from scripts.gpu_checks.report import NOTE, Report, Skipped
from scripts.gpu_checks.runner import Row, run_all, run_one
from scripts.gpu_checks.table import CHECKS, Check
from scripts.gpu_checks.world import small_run
from verl.preflight.undecided import undecided

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (sys.executable, str(Path(__file__).with_name("scripted_check.py")))
ON_CPU = (
    "environment", "attention", "trainer", "checkpoint", "engine-float32", "engine-adapter",
    "speed", "engine-graphs",
)  # fmt: skip


def scripted(name: str, seconds: float = 1.0) -> Check:
    return Check(name, "none", "none", seconds, "scripted")


def test_a_failed_check_does_not_stop_the_next(tmp_path: Path) -> None:
    """Violated bounds, exceptions and sudden ends are reported, with the figures so far."""
    names = (
        "works",
        "bounds",
        "raises",
        "dies",
        "skips",
        "works",
    )  # "works" runs again in a clean folder
    rows = {
        row.name: row for row in run_all([scripted(n) for n in names], "cpu", tmp_path, 600, SCRIPT)
    }
    assert [(row.ok, row.figures["device"]) for row in rows.values()] == [
        (True, "cpu"), (False, "cpu"), (False, "cpu"), (False, "cpu"), (None, "cpu"),
    ]  # fmt: skip
    assert rows["bounds"].error == (
        "large: got 0.7, expected below 0.5; nan: got nan, expected below 0.5"
    )
    assert rows["raises"].error == "first: ValueError: a part; RuntimeError: the rest"
    assert rows["raises"].figures["second"] == "went on"
    assert rows["dies"].error == "ended with status 3; its log ends: last words"
    assert rows["skips"].skipped == "no card" and rows["skips"].error is None
    assert all(json.loads(row.line())["name"] == name for name, row in rows.items())


def test_a_hanging_check_is_killed_with_its_children(tmp_path: Path) -> None:
    """Its row has the figures recorded before; its child, in its own session, is gone."""
    row = run_one(scripted("hangs"), "cpu", tmp_path, limit=5.0, interpreter=SCRIPT)
    assert row.ok is False and row.error is not None and row.error.startswith("killed after 5 s")
    assert not psutil.pid_exists(row.figures["child"])


@pytest.mark.parametrize("name", ["engine-eager", "engine-adapter", "train-ipc", "deaths"])
def test_a_check_of_vllm_is_skipped_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and is never reported as passed; other engines cannot prove what it checks."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Skipped, match="vLLM"):
        CHECKS[name].run(Report(tmp_path, name, "cpu"))


def test_the_check_of_ipc_fails_for_weights_that_were_not_sent(tmp_path: Path) -> None:
    """Two bytes for each weight after each step; a run that writes files logs no sent bytes."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(())}, model / "model.safetensors")
    steps = [{"step": i, "perf/weights_sent_bytes": 32.0, "timing_s/update_weights/write": 0.5}
             for i in (1, 2)]  # fmt: skip
    whole, least, none = (Report(tmp_path, name, "cpu") for name in ("whole", "least", "none"))
    train.check_transfers(whole, model, steps)
    assert whole.failures == []
    assert whole.figures["timing_s/update_weights/write_each"] == [0.5, 0.5]
    train.check_transfers(least, model, [steps[0], steps[1] | {"perf/weights_sent_bytes": 31.0}])
    train.check_transfers(none, model, [{"step": 1}])
    assert [len(report.failures) for report in (least, none)] == [1, 1]


def test_no_option_of_a_check_is_undecided() -> None:
    """Checks create ranks without the preflight, which would decide the offload options."""
    config = small_run("m", "cuda", actor_rollout_ref__ref__fsdp_config__param_offload=True)
    assert undecided(config) == []
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is True


def smoke(out: Path, *names: str, device: str = "cpu") -> dict[str, Row]:
    """Run the command; returns its rows by name."""
    command = [sys.executable, "-m", "scripts.gpu_smoke", "--device", device, "--out", str(out)]
    done = subprocess.run(
        [*command, *(["--only", *names] if names else [])], cwd=ROOT, capture_output=True, text=True
    )
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines()]
    failed = [f"{row.name}: {row.error}" for row in rows if row.ok is False]
    assert done.returncode == 0 and not failed, "\n".join([*failed, done.stderr[-3000:]])
    return {row.name: row for row in rows}


@pytest.mark.slow
def test_checks_pass_on_a_cpu_or_are_skipped(tmp_path: Path) -> None:
    """The checks run in tiny form, so that a run on a card does not fail for their own mistakes."""
    pytest.importorskip("vllm")
    rows = smoke(tmp_path, *ON_CPU)
    assert {name for name, row in rows.items() if row.ok} == {*ON_CPU} - {"engine-graphs"}
    assert rows["engine-graphs"].skipped
    assert rows["engine-float32"].figures["started_log_probs_mean"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tiny_recipes_run_and_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    """The policy searches with the real retriever; resumed steps follow those before."""
    pytest.importorskip("vllm")
    rows = smoke(tmp_path, "train-ppo", "train-ipc", "deaths")
    assert rows["train-ppo"].figures["resumed_searches"] > 0
    assert "CUDA IPC was not run" in rows["train-ipc"].figures[NOTE]
    assert rows["deaths"].figures["replica_restarts"] == 1
