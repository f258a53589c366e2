"""How the trainer acts on a verdict: warn, stop, keep healthy checkpoints."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.memory_tracker import MemoryTracker
from tests.verl.trainer.recording import (
    RecordingRanks,
    build_trainer,
    grpo_config,
    hook_of,
    prompts,
    score_by_sample,
)
from verl.batch import TokenBatch
from verl.checkpoint import folders
from verl.config import Config, GuardConfig
from verl.errors import CollapseError
from verl.ext.guard import DRIFT, HEALTHY, CollapseGuard
from verl.ext.trace import Trace
from verl.rewards.interface import Reward, RewardFn
from verl.trainer import main_ppo, run
from verl.trainer.loop import RayPPOTrainer

FELL = -5.0
"""Log-prob of every token after updates that destroyed the policy; it sampled at -1."""


class FragileRanks(RecordingRanks):
    """Ranks whose policy is destroyed by the updates of the given training steps."""

    def __init__(self, log: list[str], collapsing: set[int]) -> None:
        super().__init__(log)
        self.collapsing = collapsing
        self.updates = 0

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], torch.Tensor]:
        if role != "actor":
            return super().begin_forward(role, batch)
        self.log.append(f"log_probs of {len(batch)}")
        value = FELL if self.updates in self.collapsing else -1.0
        return lambda: torch.full((batch.num_tokens,), value)

    def update(self, role: str, mini: TokenBatch) -> dict[str, float]:
        self.updates += 1
        return {**super().update(role, mini), "actor/entropy": 0.3}


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """One update and one checkpoint per step; one healthy step confirms a checkpoint."""
    config = grpo_config(tmp_path)
    config.trainer.save_freq, config.trainer.test_freq = 1, 0
    config.trainer.val_before_train = False
    config.trainer.guard = GuardConfig(limits={"patience": 1})
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    config.actor_rollout_ref.actor.use_kl_loss = True
    return config


def build(
    config: Config, log: list[str], collapsing: set[int], steps: int = 5,
    reward_fn: RewardFn = score_by_sample,
) -> Any:  # fmt: skip
    return build_trainer(
        config, log, ranks=FragileRanks(log, collapsing), train_prompts=prompts(64),
        val_prompts=prompts(2), reward=reward_fn, total_steps=steps,
    )  # fmt: skip


def logged(trainer: RayPPOTrainer) -> list[tuple[int, float]]:
    """Return (step, `guard/health`) of each logged step."""
    return [(step, row["guard/health"]) for step, row in rows(trainer) if "guard/health" in row]


def rows(trainer: RayPPOTrainer) -> list[tuple[int, dict[str, float]]]:
    """Return all logged (step, metrics)."""
    tracker = trainer.logger._trackers[0]
    assert isinstance(tracker, MemoryTracker)
    return tracker.records


def folder_of(trainer: RayPPOTrainer) -> Path:
    """Return the run's folder."""
    return Path(trainer.config.trainer.default_local_dir)


def marked(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{HEALTHY}"))


def test_warn_continues_and_names_metric_and_value(
    config: Config, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The default action does not change the run."""
    trainer = build(config, log, {3})
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert trainer.step == 5
    assert logged(trainer) == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 0.0), (5, 0.0)]
    assert f"step 3: collapsed: {DRIFT} is -4, below -0.3" in caplog.text
    assert not [event for event in log if event.startswith("load")]


def test_the_second_forward_pass_has_the_correct_trajectories(
    config: Config, log: list[str]
) -> None:
    """Four of eight, after the update and before the engines get weights."""
    config.trainer.save_freq = 0
    build(config, log, set(), steps=1).fit()
    assert log == ["update_weights", "generate", "ref_log_probs", "update_actor",
                   "log_probs of 4", "update_weights"]  # fmt: skip
    of_updates = ("drift_drop", "drift_crash", "shift_bound", "shift_crash")
    config.trainer.guard.limits = dict.fromkeys(of_updates)
    log.clear()
    build(config, log, set(), steps=1).fit()
    assert "log_probs of 4" not in log


def test_a_checkpoint_is_healthy_when_the_next_steps_are(config: Config, log: list[str]) -> None:
    """Step 3, which collapsed, started from step 2's checkpoint; step 2 started from step 1's."""
    trainer = build(config, log, {3}, steps=3)
    trainer.fit()
    assert marked(folder_of(trainer)) == ["global_step_1"]


def test_a_checkpoint_waits_for_as_many_steps_as_patience(config: Config, log: list[str]) -> None:
    """With a patience of three, five steps confirm the checkpoints of the first two."""
    config.trainer.guard.limits = {}
    trainer = build(config, log, set(), steps=5)
    trainer.fit()
    assert marked(folder_of(trainer)) == [
        "global_step_1",
        "global_step_2",
    ]


def test_stop_names_the_checkpoint_to_continue_from(config: Config, log: list[str]) -> None:
    """The collapsed step is logged, its weights are not saved, and the exit status is distinct."""
    config.trainer.guard.action = "stop"
    trainer = build(config, log, {3})
    with pytest.raises(CollapseError) as caught:
        trainer.fit()
    message, folder = (
        str(caught.value),
        folder_of(trainer) / "global_step_1",
    )
    assert f"collapsed at step 3: {DRIFT}" in message
    assert f"trainer.resume_mode={folder}" in message
    assert caught.value.exit_code == 3
    assert logged(trainer)[-1] == (3, 2.0)
    assert not (folder_of(trainer) / "global_step_3").exists()
    assert not (folder_of(trainer) / "model").exists()


@pytest.mark.parametrize("is_full", [False, True])
def test_the_trace_has_the_step_that_ends_the_run(
    config: Config, log: list[str], is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk that prevents this does not hide the collapse."""
    config.trainer.guard.action, config.trainer.trace = "stop", True
    trainer, add = build(config, log, {3}), Trace.add_step

    def add_step(trace: Trace, step: int, *given: Any) -> None:
        if is_full and step == 3:
            raise OSError(28, "No space left on device", "trace.json")
        add(trace, step, *given)

    monkeypatch.setattr(Trace, "add_step", add_step)
    with pytest.raises(CollapseError):
        trainer.fit()
    assert ('"step": 3}' in (folder_of(trainer) / "trace.json").read_text()) is not is_full


def test_stop_without_a_healthy_checkpoint_says_so(config: Config, log: list[str]) -> None:
    """After a collapse in the first step there is only the model that training started from."""
    config.trainer.guard.action = "stop"
    with pytest.raises(CollapseError, match=r"trainer\.save_freq"):
        build(config, log, {1}).fit()


def test_a_resumed_run_remembers_baselines(config: Config, log: list[str]) -> None:
    """The healthy checkpoint and the history survive a restart."""
    first = build(config, log, set(), steps=3)
    first.fit()
    config.trainer.resume_mode = "auto"
    again = build(config, log, set(), steps=4)
    again.fit()
    assert hook_of(again, CollapseGuard).healthy == 3
    assert hook_of(again, CollapseGuard).baseline("actor/entropy") == 0.3


def test_an_older_checkpoint_without_a_guard_can_be_resumed(config: Config, log: list[str]) -> None:
    """Its run starts with a new guard."""
    first = build(config, log, set(), steps=1)
    first.fit()
    folder = Path(config.trainer.default_local_dir) / "global_step_1"
    state = folders.read_state(folder)
    del state["others"]["guard"]
    folders.write_state(folder, state)
    config.trainer.resume_mode = "auto"
    again = build(config, log, set(), steps=2)
    again.fit()
    assert again.step == 2


def test_a_guard_that_is_off_costs_nothing(config: Config, log: list[str]) -> None:
    """There is no second forward pass, no metric and no verdict."""
    config.trainer.guard.action = "off"
    trainer = build(config, log, {1, 2, 3, 4, 5})
    trainer.fit()
    assert logged(trainer) == []
    assert not [event for event in log if event.startswith("log_probs")]


def test_an_update_without_any_trajectory_reports_nothing(config: Config, log: list[str]) -> None:
    """If all scores are equal nothing is trained, and the entropy is not logged."""
    config.actor_rollout_ref.actor.use_kl_loss = False
    config.algorithm.kl_ctrl.kl_coef = 0.0
    trainer = build(config, log, set(), steps=1, reward_fn=lambda trajectory: Reward(1.0))
    trainer.fit()
    step, row = rows(trainer)[-1]
    assert step == 1
    assert "actor/entropy" not in row


def test_a_collapse_has_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher can distinguish a collapse (3) from invalid options (2)."""

    def collapse(config: Config) -> None:
        raise CollapseError("the policy collapsed at step 7")

    monkeypatch.setattr(run, "run", collapse)
    required = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]
    assert main_ppo.main(required) == 3
    assert "the policy collapsed at step 7" in capsys.readouterr().err
