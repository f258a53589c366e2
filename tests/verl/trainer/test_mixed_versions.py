"""Loss and gradient of a batch of several weight versions, against a loop in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from example.tiny import tiny_llama
from verl.batch import TokenBatch
from verl.config import ActorConfig, Config
from verl.core_algos.advantages import STD_EPSILON
from verl.core_algos.kl import FixedKLController
from verl.core_algos.mismatch import LEVELS
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples
from verl.trainer.learn import Learner, add_advantages, assemble, mini_batches
from verl.training.actor import Actor, TokenBudgets
from verl.training.models import PackedInputs
from verl.types import Origin, Prompt, Segment, Trajectory, start_trajectory

pytestmark = pytest.mark.asynchrony

GROUP = 3
CUT = {"rollout_is_threshold": 1.1}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncate": CUT,
    "mask": {**CUT, "rollout_mask_threshold": 1.15},
    "mask with a floor": {"rollout_mask_threshold": 1.1, "rollout_mask_floor": 0.8},
}


def dialogue(group: int, sample: int, draw: random.Random, is_mixed: bool) -> Trajectory:
    """Return one to three turns, each followed by an observation and of another weight version."""
    start = start_trajectory(Prompt(f"q{group}", (1, 2, 3), "nq", ("a",)), f"4/{group}", sample)
    for version in range(draw.randint(1, 3)):
        ids = tuple(draw.randrange(90) for _ in range(draw.randint(1, 4)))
        log_probs = tuple(-draw.random() for _ in ids)
        policy = Segment(Origin.POLICY, ids, "x", log_probs, 2 + version * is_mixed)
        start.segments += [policy, Segment(Origin.OBSERVATION, (7, 8), "d")]
    return start


class Ranks:
    """Ranks whose current log-probs differ a little from those of the weights that sampled."""

    def __init__(self, noise_scale: float) -> None:
        self._noise_scale = noise_scale

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], Tensor]:
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
        return lambda: batch.tokens["rollout_log_probs"] + self._noise_scale * noise


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Four groups of three in one mini-batch, sampled by weights up to two versions old."""
    tiny_llama(97).config.save_pretrained(tmp_path)
    config = Config()
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.actor_rollout_ref.rollout.max_staleness = 2
    config.actor_rollout_ref.rollout.n_agent = GROUP
    config.actor_rollout_ref.actor.ppo_epochs = 2  # with one, old log-probs are not needed
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "grpo", 0.0
    return config


def make_mini_batch(config: Config, is_mixed: bool = True) -> TokenBatch:
    """Return the mini-batch as a training step makes it."""
    draw = random.Random(5)
    dialogues = [dialogue(g, n, draw, is_mixed) for g in range(4) for n in range(GROUP)]
    rewards = [Reward(draw.random()) for _ in dialogues]
    batch = assemble(Samples(dialogues, rewards), config)
    versions = batch.tokens["weight_versions"][batch.tokens["policy_mask"]].unique()
    assert len(versions) == (3 if is_mixed else 1)
    ranks: Any = Ranks(0.08)
    Learner(config, ranks, FixedKLController(0.0)).compute_log_probs(batch)
    add_advantages(batch, config, FixedKLController(0.0))
    return mini_batches(batch, config, len(batch), 1, step=4)[0]


def loss_of(actor: ActorConfig, batch: TokenBatch, log_probs: Tensor) -> Tensor:
    """Return the real actor's loss of a mini-batch whose tokens have these log-probs."""
    device = torch.device("cpu")
    inputs = PackedInputs.of(batch, batch.tokens["loss_mask"], device)
    outputs = log_probs[inputs.target_positions], torch.zeros(len(inputs.target_positions))
    model: Any = SimpleNamespace(device=device, forward=lambda *_: outputs)
    loss, _, _ = Actor(model, actor, TokenBudgets())._loss(batch, inputs)
    return loss


def correction(actor: ActorConfig, own: float, all_own: list[float]) -> float:
    """Return the weight of a token with log-ratio `own` in a sequence with log-ratios `all_own`."""
    chosen = actor.correction
    if chosen.rollout_is == "none":
        return 1.0
    logs = {"token": own, "sequence": sum(all_own), "geometric": fmean(all_own)}
    ratio = math.exp(logs[chosen.rollout_is])
    high, low = chosen.rollout_mask_threshold, chosen.rollout_mask_floor
    if high is not None and not (1 / high if low is None else low) <= ratio <= high:
        return 0.0
    return min(chosen.rollout_is_threshold, ratio)


def plain_loss(
    actor: ActorConfig, batch: TokenBatch, log_probs: Tensor
) -> tuple[Tensor, set[float]]:
    """Return the loss by a loop over sequences and tokens, and the correction weights it used."""
    groups, scores = batch.columns["group"], batch.rows["scores"].tolist()
    total, used = log_probs.new_zeros(()), set[float]()
    old, rollout = (batch.tokens[f"{name}_log_probs"].double() for name in ("old", "rollout"))
    num_tokens = int(batch.tokens["policy_mask"].sum())
    for i, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        peers = [score for score, group in zip(scores, groups, strict=True) if group == groups[i]]
        std = pstdev(peers) * math.sqrt(GROUP / (GROUP - 1))
        advantage = (scores[i] - fmean(peers)) / (std + STD_EPSILON)
        own = [t for t in range(start, end) if batch.tokens["policy_mask"][t]]
        logs = [float(old[t] - rollout[t]) for t in own]
        for t, log in zip(own, logs, strict=True):
            ratio = (log_probs[t] - old[t]).exp()
            loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                loss = loss.clamp(max=-3.0 * advantage)
            used.add(correction(actor, log, logs))
            total = total + correction(actor, log, logs) * loss / num_tokens
    return total, used


@pytest.mark.parametrize(
    ("level", "kind"), [("none", "truncate"), *product(LEVELS[1:], CORRECTIONS)]
)
def test_line_23_loss_and_gradient_equal_a_loop_over_tokens(
    config: Config, level: str, kind: str
) -> None:
    """Loss and gradient equal a loop, with engine log-probs as the old ones (level none).

    The same holds with recomputed ones and each correction, which has an effect in each case.
    """
    actor = config.actor_rollout_ref.actor
    if level != "none":
        actor.old_log_probs = "recompute"
        actor.rollout_correction = {"rollout_is": level, **CORRECTIONS[kind]}
    mini = make_mini_batch(config)
    rollout, old = mini.tokens["rollout_log_probs"], mini.tokens["old_log_probs"]
    assert torch.equal(old, rollout) is (level == "none")
    moved = torch.randn(len(rollout), generator=torch.Generator().manual_seed(2))
    log_probs = (rollout.double() + 0.6 * moved).requires_grad_()
    expected, used = plain_loss(actor, mini, log_probs)
    (gradient,) = torch.autograd.grad(expected, log_probs)
    loss = loss_of(actor, mini, log_probs)
    (actual,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(actual, gradient, rtol=1e-5, atol=1e-9)
    assert gradient.any() and (level == "none" or len(used) > 1)
