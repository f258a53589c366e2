"""The runner of the GPU checks: a failing check affects neither the others nor the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts import gpu_smoke
from scripts.gpu_checks.runner import Row, run_all, run_one
from scripts.gpu_checks.table import ALL, Check
from scripts.gpu_checks.world import small_run
from verl.preflight.memory.check import undecided

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


def test_checks_without_time_are_named_and_the_run_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check without enough time is skipped, never passed; shorter ones may still run."""
    checks = [scripted("works"), scripted("long", seconds=900.0), scripted("works")]
    rows = list(run_all(checks, "cpu", tmp_path, 600, SCRIPT))
    assert [(row.ok, row.is_missing) for row in rows] == [
        (True, False),
        (None, True),
        (True, False),
    ]
    assert "needs about 900 s" in str(rows[1].skipped)
    monkeypatch.setattr(gpu_smoke, "run_all", lambda *_: iter(rows))
    assert gpu_smoke.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert [json.loads(line)["ok"] for line in printed.out.splitlines()] == [True, None, True]
    assert "skipped" in printed.err


def test_only_and_skip_choose_checks_in_their_own_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands can divide the checks between them, and none is lost."""
    first = ["environment", "speed", "attention"]
    assert gpu_smoke.main(["--list", "--only", *first]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["environment", "attention", "speed"]
    gpu_smoke.main(["--list", "--skip", *first])
    rest = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted([*listed, *rest]) == sorted(check.name for check in ALL)


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
    rows = smoke(tmp_path, "train-ppo", "deaths")
    assert rows["train-ppo"].figures["resumed_searches"] > 0
    assert rows["deaths"].figures["replica_restarts"] == 1
