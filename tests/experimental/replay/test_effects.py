"""The advantage and the gradient of a replay, against plain formulas."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_r1.experimental.replay.findings import (
    advantage_caveat,
    gradients,
    mean_advantage,
    training_batch,
)
from tests.verl.training.ranks import VOCAB, save_tiny, tiny_config
from verl.config import Config
from verl.data.trajectories import RecordedTrajectory
from verl.rewards.interface import Reward
from verl.types import Draw, Origin, Prompt, Segment, Trajectory

SCORES = (1.0, 0.0, 0.0, 0.5, 0.5, 0.5)
"""Scores of two groups of three trajectories."""


def trajectory(number: int, seed: int) -> Trajectory:
    """Build a trajectory of prompt, turn, documents and turn, with random ids."""
    drawn = torch.Generator().manual_seed(seed)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB, (size,), generator=drawn).tolist())

    prompt = Prompt(f"f#{number // 3}", (5, 6, 7), "nq", ("a",))
    turns = [Segment(Origin.POLICY, ids(size), "", (-1.0,) * size, 1) for size in (4, 3)]
    segments = [Segment(Origin.PROMPT, (5, 6, 7)), turns[0], Segment(Origin.OBSERVATION, ids(5)),
                turns[1]]  # fmt: skip
    return Trajectory(prompt, segments, draw=Draw(f"1/{number // 3}", number % 3))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = tiny_config(save_tiny(tmp_path / "model"), adv_estimator="grpo")
    config.actor_rollout_ref.rollout.temperature = 0.8
    return config


STEP = [RecordedTrajectory(trajectory(i, i), Reward(score)) for i, score in enumerate(SCORES)]


def test_the_advantage_is_computed_within_the_recorded_group(config: Config) -> None:
    """It is (score - mean) / std with the two other members as they were recorded."""
    other = RecordedTrajectory(trajectory(1, 9), Reward(0.25))
    expected = (0.25 - 1.25 / 3) / (float(torch.tensor([1.0, 0.25, 0.0]).std()) + 1e-6)
    assert mean_advantage(training_batch(config, STEP, 1, other)) == pytest.approx(
        expected, rel=1e-5
    )
    assert mean_advantage(training_batch(config, STEP, 4, STEP[4])) == 0


def test_missing_parts_of_the_advantage_are_reported(config: Config) -> None:
    """Critic values are not recorded, and KL in the reward is left out."""
    assert advantage_caveat(config) == ""
    config.actor_rollout_ref.actor.use_kl_loss = False
    assert "without the KL in the reward" in advantage_caveat(config)
    config.algorithm.adv_estimator = "gae"
    assert "needs the critic" in advantage_caveat(config)


def plain_gradient(config: Config, row: RecordedTrajectory, value: float) -> torch.Tensor:
    """Compute the gradient of -A * sum(log p(token)) / (tokens of the step) with transformers."""
    model = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path)
    ids = row.trajectory.ids
    logits = model(torch.tensor([ids])).logits[0].float() / 0.8
    log_probs = logits.log_softmax(-1)
    positions = [*range(3, 7), *range(12, 15)]
    loss = -value * sum(log_probs[i - 1, ids[i]] for i in positions) / (len(STEP) * 7)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def test_norms_and_cosines_are_those_of_plain_gradients(config: Config) -> None:
    """A trajectory of the same length takes the place of the recorded one."""
    other = RecordedTrajectory(trajectory(0, 77), Reward(0.3))
    batches = [training_batch(config, STEP, 0, row) for row in (STEP[0], other)]
    found = gradients(config, Path(config.actor_rollout_ref.model.path), *batches)
    before, after = (
        plain_gradient(config, row, mean_advantage(batch))
        for row, batch in zip((STEP[0], other), batches, strict=True)
    )
    cosine = torch.nn.functional.cosine_similarity
    change = after - before
    expected = (before.norm(), after.norm(), change.norm(), cosine(before, after, dim=0),
                cosine(before, change, dim=0))  # fmt: skip
    assert dataclasses.astuple(found) == pytest.approx([float(x) for x in expected], rel=1e-3)


def test_a_zero_gradient_has_no_cosine(config: Config) -> None:
    """The gradient of a group with equal scores is zero and has no direction."""
    batch = training_batch(config, STEP, 4, STEP[4])
    found = gradients(config, Path(config.actor_rollout_ref.model.path), batch, batch)
    assert dataclasses.astuple(found) == (0.0, 0.0, 0.0, None, None)
