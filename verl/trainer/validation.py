"""Validation: every row once, greedy unless configured otherwise; dialogues go to a jsonl file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from verl.config import Config
from verl.files import atomic_write
from verl.rewards.interface import Reward, RewardManager
from verl.rollout.pool import RetryingRollout, RolloutPool, check_lost_share
from verl.trainer.metrics import validation_metrics
from verl.types import Metrics, Prompt, Sampling, Status, Trajectory, start_trajectory

VALIDATION_STREAM = 1 << 31
"""Keeps the seeds of validation apart from those of any training step."""


def trajectory_seed(*key: int) -> int:
    """A 31-bit seed that depends on every part of the key (run seed, step, index)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] & 0x7FFFFFFF)


def validate(
    config: Config,
    rollout: RetryingRollout,
    prompts: Sequence[Prompt],
    reward: RewardManager,
    dialogues: Path,
) -> Metrics:
    """Score every prompt and write one json line for each to `dialogues`.

    A row whose tools or engine failed for good was asked again and again and has no score of its
    own; it counts with the lowest, and as `val/fault/trajectories_failed`. Left out, it would raise
    the score: what fails mostly called a tool. Raises ToolOutage as `check_lost_share` does.
    """
    trajectories = sample(config, rollout, prompts)
    failed = [t for t in trajectories if t.status is Status.FAILED]
    share = config.trainer.max_lost_share
    check_lost_share(failed, len(failed), len(trajectories), "validation", share)
    rewards = scored(trajectories, reward)
    write_dialogues(dialogues, trajectories, rewards)
    faults = {f"val/{name}": count for name, count in rollout.take_faults().items()}
    return {**validation_metrics(trajectories, rewards), **faults}


def scored(trajectories: Sequence[Trajectory], reward: RewardManager) -> list[Reward]:
    """A reward for each; of a failed one the lowest score of all, at most 0, and 0 in each part."""
    given = reward([t for t in trajectories if t.status is not Status.FAILED])
    parts = dict.fromkeys((name for r in given for name in r.components), 0.0)
    lowest, rest = Reward(min(0.0, *(r.score for r in given)), parts), iter(given)
    return [lowest if t.status is Status.FAILED else next(rest) for t in trajectories]


def sample(config: Config, rollout: RolloutPool, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """One trajectory per prompt, in requests of `data.val_batch_size`."""
    options = config.val_sampling
    sampling = Sampling(config.data.max_response_length, options.temperature, options.top_p)
    trajectories: list[Trajectory] = []
    size = config.data.val_batch_size
    with tqdm(total=len(prompts), desc="validate", unit="row", leave=False) as bar:
        for first in range(0, len(prompts), size):
            starts = [
                start_trajectory(
                    prompts[row],
                    group=f"val/{row}",
                    seed=trajectory_seed(config.trainer.seed, VALIDATION_STREAM, row),
                )
                for row in range(first, min(first + size, len(prompts)))
            ]
            trajectories += rollout.generate(starts, sampling)
            bar.update(len(starts))
    return trajectories


def write_dialogues(
    path: Path, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> None:
    """One json line per row: question, gold, dialogue, ending, score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part, part.open("w", encoding="utf-8") as file:
        for t, r in zip(trajectories, rewards, strict=True):
            row = {
                "uid": t.prompt.uid,
                "data_source": t.prompt.data_source,
                "question": t.prompt.extra_info.get("question", ""),
                "ground_truth": list(t.prompt.ground_truth),
                "dialogue": t.text,
                "status": t.status.value,
                "score": r.score,
                **r.components,
                "stats": t.stats,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
