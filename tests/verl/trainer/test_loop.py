"""The algorithm's order of work, tested with recording groups instead of Ray actors."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from example.tiny import tiny_llama
from tests.memory_tracker import MemoryTracker
from tests.verl.trainer.documented import undocumented
from tests.verl.trainer.recording import (
    RecordingRanks,
    build_trainer,
    grpo_config,
    hook_of,
    prompts,
)
from verl.config import Config
from verl.monitor.performance import RANK_PHASES
from verl.monitor.tracking import Tracking
from verl.trainer.loop import RayPPOTrainer
from verl.trainer.progress import gpu_hours
from verl.trainer.validate import Validation
from verl.training.devices import PeakMemory


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def trainer(tmp_path: Path, log: list[str]) -> RayPPOTrainer:
    config = grpo_config(tmp_path, n_agent=3)
    config.trainer.test_freq = 0
    config.data.val_batch_size = 4
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    config.actor_rollout_ref.actor.use_kl_loss = True
    return build(config, log)


def build(config: Config, log: list[str], **changes: Any) -> Any:
    return build_trainer(config, log, val_prompts=prompts(10), total_steps=2, **changes)


def test_line_11_groups_are_prompt_instances_with_n_members(trainer: RayPPOTrainer) -> None:
    """Equal indices of two data sets are two groups; each keeps its n members when shuffled."""
    trainer.fit()
    for step in (0, 1):
        minis = trainer.ranks.mini_batches[2 * step : 2 * step + 2]
        groups = Counter(g for mini in minis for g in mini.columns["group"])
        assert len(groups) == 4
        assert set(groups.values()) == {3}
    starts, _ = trainer.rollouts.requests[1]
    by_group: dict[str, set[str]] = {}
    for start in starts:
        by_group.setdefault(start.group, set()).add(start.prompt.uid)
    assert all(len(uids) == 1 for uids in by_group.values())


def test_line_12_every_trajectory_has_its_own_seed(trainer: RayPPOTrainer) -> None:
    """No two samples of a run share a seed, and the same run draws the same seeds."""
    trainer.fit()
    seeds = [start.seed for starts, _ in trainer.rollouts.requests for start in starts]
    assert len(set(seeds)) == len(seeds)
    again = build(trainer.config, [])
    again.fit()
    assert [s.seed for starts, _ in again.rollouts.requests for s in starts] == seeds


def test_line_13_validation_is_greedy_and_scores_every_row(trainer: RayPPOTrainer) -> None:
    """Validation uses temperature 0 and includes the last, smaller request (10 rows by 4)."""
    metrics = hook_of(trainer, Validation).validate(trainer)
    assert [len(starts) for starts, _ in trainer.rollouts.requests] == [4, 4, 2]
    assert {sampling.temperature for _, sampling in trainer.rollouts.requests} == {0.0}
    assert metrics["val/num_rows"] == 10
    rows = (
        (Path(trainer.config.trainer.default_local_dir) / "validation" / "step_0.jsonl")
        .read_text()
        .splitlines()
    )
    assert len({json.loads(row)["uid"] for row in rows}) == 10


def test_line_14_one_log_prob_pass_and_one_weight_update_per_step(
    trainer: RayPPOTrainer, log: list[str]
) -> None:
    """A step computes log-probs once and transfers weights once, whatever its mini-batches."""
    trainer.config.trainer.val_before_train = False
    trainer.fit()
    step = ["generate", "log_probs", "ref_log_probs", "update_actor", "update_actor"]
    assert log == ["update_weights", *(2 * [*step, "update_weights"])]


def test_a_step_reports_the_machines_performance(trainer: RayPPOTrainer, tmp_path: Path) -> None:
    """Utilization, memory by phase, parts of the transfer, as in docs/reference/metrics.md."""
    tiny_llama(97).config.save_pretrained(tmp_path)
    tracker, ranks = MemoryTracker(), RecordingRanks([])
    ranks.card, ranks.peak = "NVIDIA H200", PeakMemory(3_000_000_000, 4_000_000_000)
    tracking = Tracking("p", "e", [tracker], str(tmp_path))
    build(trainer.config, [], ranks=ranks, logger=tracking).fit()
    rows = [row for step, row in tracker.records if step]
    assert undocumented({name for row in rows for name in row}) == []
    for row in rows:
        assert 0 < row["perf/mfu/actor"] == pytest.approx(row["perf/tflops/actor"] / 989)
        assert 1 < row["perf/hfu/actor"] / row["perf/mfu/actor"] < 4 / 3
        for phase in set(RANK_PHASES) - {"guard"}:  # which is off here
            assert f"timing_s/{phase}" in row
            assert row[f"perf/device_memory_gb/{phase}/allocated"] == 3.0
            assert row[f"perf/device_memory_gb/{phase}/reserved"] == 4.0
        parts = [s for name, s in row.items() if name.startswith("timing_s/update_weights/")]
        assert len(parts) == 4 and sum(parts) <= row["timing_s/update_weights"]


def test_the_bar_shows_gpu_hours() -> None:
    """Hours since the start of this process, and expected hours of all its steps; none on CPU."""
    assert gpu_hours(0, 1800.0, 0.25) == {}
    assert gpu_hours(8, 1800.0, 0.25) == {"gpu_h": "4.00/16.00"}


def test_line_15_n_steps_make_n_updates(trainer: RayPPOTrainer, log: list[str]) -> None:
    """Two steps make two weight transfers after the initial one."""
    trainer.fit()
    assert log.count("update_weights") == 1 + 2
    assert trainer.step == 2


def test_loss_weights_and_advantages_exist_on_policy_tokens_only(trainer: RayPPOTrainer) -> None:
    """Observation tokens have neither weight nor advantage."""
    trainer.fit()
    for mini in trainer.ranks.mini_batches:
        outside = ~mini.tokens["policy_mask"]
        assert mini.tokens["loss_weights"][outside].abs().max() == 0
        assert mini.tokens["advantages"][outside].abs().max() == 0
        assert mini.tokens["loss_weights"].sum().item() == pytest.approx(1.0, abs=1e-6)


def test_without_state_masking_documents_are_trained_on(trainer: RayPPOTrainer) -> None:
    """The ablation adds observation tokens to the loss, but never prompts."""
    trainer.config.actor_rollout_ref.actor.state_masking = False
    trainer.fit()
    mini = trainer.ranks.mini_batches[0]
    assert torch.equal(mini.tokens["loss_mask"], mini.tokens["response_mask"])
    assert mini.tokens["loss_weights"][~mini.tokens["policy_mask"]].abs().max() > 0


def test_validation_only_makes_no_update(trainer: RayPPOTrainer, log: list[str]) -> None:
    """`val_only` validates once and stops."""
    trainer.config.trainer.val_only = True
    build(trainer.config, log).fit()
    assert "update_actor" not in log
