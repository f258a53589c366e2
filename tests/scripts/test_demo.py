"""The demo's choice of device and its consequences; nothing is trained."""

import subprocess
from pathlib import Path

import pytest

from scripts import demo
from scripts.demo import Demo, check_staleness, choose_device
from verl.config import cli
from verl.errors import ResourceError


@pytest.mark.parametrize(
    ("wanted", "has_card", "installed", "expected"),
    [
        ("auto", False, "cpu", "cpu"),
        ("auto", True, "cuda", "cuda"),
        ("cuda", True, "cuda", "cuda"),
        ("cpu", True, "cpu", "cpu"),
    ],
)
def test_the_card_is_used_where_there_is_one(
    wanted: str, has_card: bool, installed: str, expected: str
) -> None:
    """`auto` takes the card if there is one; an explicit device is used as given."""
    assert choose_device(wanted, has_card, installed) == expected


@pytest.mark.parametrize(
    ("wanted", "has_card", "installed", "message"),
    [
        ("cuda", False, "cuda", "got cuda without a GPU"),
        ("cpu", True, "cuda", "got cpu with vLLM's cuda build"),
        ("auto", False, "cuda", "got cpu with vLLM's cuda build"),
        ("auto", False, "", "got no vLLM"),
    ],
)
def test_an_engine_for_another_device_is_refused_at_once(
    wanted: str, has_card: bool, installed: str, message: str
) -> None:
    """vLLM's GPU build would take 92 % of card 0 while the trainer runs on the CPU."""
    with pytest.raises(ResourceError, match=message):
        choose_device(wanted, has_card, installed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_both_phases_compute_on_the_chosen_device(
    device: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm start and training get the same device; the trainer shares a card with the engine."""
    commands: list[list[str]] = []
    monkeypatch.setattr(demo, "run", lambda command, *_: commands.append(command))
    run = Demo(algorithm, 0, device, tmp_path, 0.0)
    run.warm_start()
    run.train(tmp_path, "empty", tmp_path / "warm_start")
    warm_start, training = commands
    assert f"device={device}" in warm_start
    config = cli.compose([f"actor_rollout_ref.model.path={tmp_path}", *training[2:]])
    assert config.trainer.device == device and config.trainer.n_gpus_per_node == 1
    rollout = config.actor_rollout_ref.rollout
    expected = (0.4, {"enforce_eager": True}) if device == "cuda" else (0.6, {})
    assert (rollout.gpu_memory_utilization, rollout.engine_kwargs) == expected
    assert rollout.max_staleness == 0


def test_sampling_ahead_is_refused_on_a_shared_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ASYNC=K` is the training's `max_staleness`; on the single card it is refused at once."""
    commands: list[list[str]] = []
    monkeypatch.setattr(demo, "run", lambda command, *_: commands.append(command))
    Demo("grpo", 0, "cpu", tmp_path, 0.0, staleness=2).train(tmp_path, "empty", tmp_path)
    config = cli.compose([f"actor_rollout_ref.model.path={tmp_path}", *commands[0][2:]])
    assert config.actor_rollout_ref.rollout.max_staleness == 2
    check_staleness(2, "cpu")
    check_staleness(0, "cuda")
    with pytest.raises(ResourceError, match="got 2, expected 0"):
        check_staleness(2, "cuda")


@pytest.mark.parametrize("target", ["demo", "demo-zh", "demo-hard"])
def test_a_dry_run_of_make_trains_nothing(tmp_path: Path, target: str) -> None:
    """make runs a line that names $(MAKE) under -n too; in this empty folder that would fail."""
    command = ["make", "-n", "-f", str(demo.ROOT / "Makefile"), target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "scripts.demo" in done.stdout and not list(tmp_path.iterdir())
