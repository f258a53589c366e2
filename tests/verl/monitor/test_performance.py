"""Utilisation and memory of a step, computed by hand for a given batch and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from example.tiny import tiny_llama
from tests.verl.trainer.recording import RecordingRanks
from tests.verl.training.ranks import VOCAB
from verl.batch import ROW_STARTS, TokenBatch
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.ext.speed import Work, WorkCounter, speed_metrics
from verl.monitor.performance import Timings
from verl.trainer.learn import Learner
from verl.training.devices import PeakMemory

LENGTHS, TARGETS = [5, 8, 6], [3, 4, 2]
MATRICES = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
"""Matrix weights of the tiny Llama: two blocks with q and o, k and v, and three of the MLP."""


def batch() -> TokenBatch:
    """Return three sequences that end with policy tokens; the second has no advantage."""
    masks = [torch.arange(n) >= n - k for n, k in zip(LENGTHS, TARGETS, strict=True)]
    mask = torch.cat(masks)
    advantages = torch.cat([m * float(i != 1) for i, m in enumerate(masks)])
    tokens = {"loss_mask": mask, "advantages": advantages}
    groups = {"group": [f"g{i}" for i in range(len(LENGTHS))]}
    return TokenBatch(torch.tensor([0, *LENGTHS]).cumsum(0), tokens, columns=groups)


def forward(lengths: list[int], head: int, adapter: int = 0) -> float:
    """Return 2 FLOPs per weight and token, half of each square for 4 heads of 32, and the head."""
    squares = sum(n**2 for n in lengths)
    return 2 * (MATRICES + adapter) * sum(lengths) + 2 * (4 * 32 * 4 * squares / 2) + 2 * 128 * head


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """GRPO with one update per step, without recomputation; only the model's config exists."""
    tiny_llama(VOCAB).config.save_pretrained(tmp_path)
    config = Config()
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.critic.model.enable_gradient_checkpointing = False
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n_agent = 3, 1
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 3
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.algorithm.adv_estimator = "grpo"
    return config


def work_of(config: Config, seen: TokenBatch | None = None) -> dict[str, Work]:
    """Run a learner's step over the batch; returns the counted work."""
    work = WorkCounter(config)
    learner = Learner(config, RecordingRanks([]), FixedKLController(0.0), work)  # type: ignore[arg-type]
    seen = seen or batch()
    learner.prepare(seen, Timings())
    learner.update(seen, 1, Timings())
    found = work.take()
    assert work.take() == {}
    return found


def test_a_grpo_step_is_a_reference_pass_and_an_update(config: Config) -> None:
    """Logits are computed for policy tokens only; backward costs twice the forward."""
    forward_flops = forward(LENGTHS, VOCAB * sum(TARGETS))
    assert work_of(config) == {
        "old_log_prob": Work(forward_flops),
        "update_actor": Work(3 * forward_flops),
    }


def test_skipped_sequences_are_not_counted(config: Config) -> None:
    """A sequence without advantage costs nothing if the loss has no other term."""
    config.actor_rollout_ref.actor.use_kl_loss = False
    config.algorithm.kl_ctrl.kl_coef = 0.0
    forward_flops = forward([5, 6], VOCAB * (3 + 2))
    assert work_of(config) == {"update_actor": Work(3 * forward_flops)}


def test_rows_of_an_episode_do_not_attend_to_each_other(config: Config) -> None:
    """An episode of two rows costs what two sequences do."""
    seen = batch()
    rows = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    rows[LENGTHS[0] + 3] = True
    seen.tokens |= {ROW_STARTS: rows, "input_ids": torch.arange(sum(LENGTHS))}
    first, second, third = LENGTHS
    forward_flops = forward([first, 3, second - 3, third], VOCAB * sum(TARGETS))
    assert work_of(config, seen)["update_actor"] == Work(3 * forward_flops)


def test_a_step_of_ppo_has_a_critic_too(config: Config) -> None:
    """With KL in the reward, the policy tokens have two forward passes; a value has one output."""
    config.algorithm.adv_estimator, config.actor_rollout_ref.actor.use_kl_loss = "gae", False
    config.actor_rollout_ref.actor.entropy_coeff = 1e-6
    policy, critic = forward(LENGTHS, VOCAB * sum(TARGETS)), forward(LENGTHS, sum(TARGETS))
    assert work_of(config) == {
        "old_log_prob": Work(2 * policy),
        "values": Work(critic),
        "update_critic": Work(3 * critic),
        "update_actor": Work(3 * policy),
    }


def test_a_model_of_unknown_shape_is_not_counted(config: Config, tmp_path: Path) -> None:
    """There are no figures rather than guesses."""
    config.actor_rollout_ref.model.path = str(tmp_path / "elsewhere")
    assert work_of(config) == {}


def test_utilisation_is_a_share_of_the_peak() -> None:
    """6e12 FLOPs in 3 s on 4 cards of 1e12 FLOP/s are 0.5 TFLOP/s each, half of the peak."""
    work = {"update_actor": Work(6e12, 3e12), "values": Work(3e12)}
    seconds = {"update_actor": 3.0, "values": 1.5, "gen": 9.0}
    assert speed_metrics(work, seconds, (4, 4), 1e12) == pytest.approx({
        "perf/tflops/actor": 0.5, "perf/mfu/actor": 0.5, "perf/hfu/actor": 0.75,
        "perf/tflops/values": 0.5, "perf/mfu/values": 0.5,
    })  # fmt: skip


def test_without_a_known_card_there_is_no_utilisation() -> None:
    """On CPU, for example, there is only the speed."""
    assert speed_metrics({"values": Work(3e12)}, {"values": 1.5}, (1, 1), None) == {
        "perf/tflops/values": 2.0
    }


def peaks(*gigabytes: float) -> Iterator[PeakMemory]:
    return (PeakMemory(int(x * 1e9), int(2 * x * 1e9)) for x in gigabytes)


def test_each_phase_of_the_ranks_has_its_own_peak() -> None:
    """Peaks before the step or in another phase are not included; engine phases have none."""
    readings = peaks(99, 3, 7, 88, 5)
    timings = Timings(lambda: next(readings))
    for name in ("gen", "old_log_prob", "adv", "update_actor", "guard", "update_weights"):
        with timings.phase(name):
            pass
    memory = {name: x for name, x in timings.metrics().items() if name.startswith("perf/")}
    expected = {"old_log_prob": 3.0, "update_actor": 7.0, "guard": 88.0, "update_weights": 5.0}
    assert memory == {
        f"perf/device_memory_gb/{phase}/{kind}": factor * x
        for phase, x in expected.items()
        for kind, factor in (("allocated", 1), ("reserved", 2))
    }
    assert next(readings, None) is None


def test_ranks_on_cpu_have_no_device_memory() -> None:
    """The keys are absent rather than zero."""
    timings = Timings(lambda: None)
    with timings.phase("update_actor"):
        pass
    assert set(timings.metrics()) == {"timing_s/update_actor", "timing_s/step"}
