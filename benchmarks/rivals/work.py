"""The work of the compared updates: the same tokens, masks and scores for all workers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.update_speed import read_samples
from verl.batch import TokenBatch
from verl.trainer.collect import Samples


def split(rollouts: Path, questions: int) -> list[Samples]:
    """Divide the recorded trajectories into updates with all samples of `questions` questions."""
    updates = []
    for step in read_samples(rollouts):
        groups = list(dict.fromkeys(t.group for t in step.trajectories))
        for start in range(0, len(groups) - questions + 1, questions):
            chosen = groups[start : start + questions]
            indices = [i for i, t in enumerate(step.trajectories) if t.group in chosen]
            trajectories = [step.trajectories[i] for i in indices]
            updates.append(Samples(trajectories, [step.rewards[i] for i in indices]))
    return updates


def write(updates: list[Samples], path: Path) -> list[int]:
    """Write the updates as JSON rows, for workers that cannot import our types.

    Returns the number of tokens of each update.
    """
    work, sizes = [], []
    for samples in updates:
        batch = TokenBatch.from_trajectories(samples.trajectories)
        ids, policy = batch.tokens["input_ids"].tolist(), batch.tokens["policy_mask"].tolist()
        response_mask = batch.tokens["response_mask"].tolist()
        rows = []
        for number, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
            first = response_mask.index(True, start, end)
            rows.append({
                "prompt": ids[start:first], "response": ids[first:end],
                "mask": [int(is_policy) for is_policy in policy[first:end]],
                "score": samples.rewards[number].score,
                "group": str(batch.columns["group"][number]),
            })  # fmt: skip
        work.append(rows)
        sizes.append(len(ids))
    path.write_text(json.dumps(work))
    return sizes
