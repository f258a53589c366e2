"""The updates that all contenders make: the same tokens, masks and scores."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.update_speed import steps
from verl.trainer.collection import Samples
from verl.types import TokenBatch


def split(rollouts: Path, questions: int) -> list[Samples]:
    """The recorded trajectories, those of `questions` questions an update."""
    found = []
    for step in steps(rollouts):
        groups = list(dict.fromkeys(t.group for t in step.trajectories))
        for start in range(0, len(groups) - questions + 1, questions):
            chosen = groups[start : start + questions]
            places = [i for i, t in enumerate(step.trajectories) if t.group in chosen]
            found.append(
                Samples([step.trajectories[i] for i in places], [step.rewards[i] for i in places])
            )
    return found


def write(samples: list[Samples], path: Path) -> list[int]:
    """Write them as lists of plain rows for those who know none of our types; tokens of each."""
    found, sizes = [], []
    for one in samples:
        batch = TokenBatch.from_trajectories(one.trajectories)
        ids, policy = batch.tokens["input_ids"].tolist(), batch.tokens["policy_mask"].tolist()
        begins = batch.tokens["response_mask"].tolist()
        rows = []
        for number, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
            first = begins.index(True, start, end)
            rows.append({
                "prompt": ids[start:first], "response": ids[first:end],
                "mask": [int(is_policy) for is_policy in policy[first:end]],
                "score": one.rewards[number].score, "group": str(batch.columns["group"][number]),
            })  # fmt: skip
        found.append(rows)
        sizes.append(len(ids))
    path.write_text(json.dumps(found))
    return sizes
