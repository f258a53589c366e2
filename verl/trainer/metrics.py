"""Metrics of one training step, computed from its trajectories, batch and timings. No I/O here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from verl.batch import TokenBatch
from verl.packing import saved_token_share
from verl.types import Metrics, Origin, Status, Trajectory

if TYPE_CHECKING:
    from verl.monitor.performance import Timings
    from verl.rewards.interface import Reward

ALL_WRONG, ALL_WRONG_UPDATE = "critic/all_wrong_share", "critic/all_wrong_update"
FAULTS = ("trajectories_resampled", "trajectories_failed", "trajectories_dropped", "outage_s")
"""Faults that every step reports; those of tools and agents come from the trajectories."""


def min_mean_max(name: str, values: Sequence[float] | Tensor) -> Metrics:
    """Return minimum, mean and maximum of non-empty `values`, as `NAME/min` and so on."""
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/min": float(array.min()),
        f"{name}/max": float(array.max()),
    }


def mean_by_key(rows: Sequence[Mapping[str, float]]) -> Metrics:
    """Return the mean of each key over the rows that have it."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            columns[key].append(value)
    return {key: float(np.mean(values)) for key, values in columns.items()}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return lengths, statuses and agent counts over all trajectories, failed ones too."""
    observation_lengths = [t.num_tokens_of(Origin.OBSERVATION) for t in trajectories]
    status_shares = {
        f"rollout/{status.value}": float(np.mean([t.status is status for t in trajectories]))
        for status in Status
    }
    return {
        **min_mean_max("response_length", [t.num_policy_tokens for t in trajectories]),
        **min_mean_max("observation_length", observation_lengths),
        "prompt_length/mean": float(np.mean([len(t.prompt.ids) for t in trajectories])),
        **status_shares,
        **{f"env/{k}": v for k, v in mean_by_key([t.stats for t in trajectories]).items()},
    }


def fault_metrics(trajectories: Sequence[Trajectory], num_dropped: int = 0) -> Metrics:
    """Return the faults of all trajectories, and how many failed for good or were dropped."""
    counts = defaultdict(float, dict.fromkeys(FAULTS, 0.0))
    for trajectory in trajectories:
        counts["trajectories_failed"] += trajectory.status is Status.FAILED
        for name, count in trajectory.faults.items():
            counts[name] += count
    counts["trajectories_dropped"] += num_dropped
    return {f"fault/{name}": float(count) for name, count in counts.items()}


def reward_metrics(rewards: Sequence[Reward]) -> Metrics:
    """Return statistics of the score, and the mean of each component."""
    components = mean_by_key([r.components for r in rewards])
    return {
        **min_mean_max("critic/score", [r.score for r in rewards]),
        **{f"reward/{name}": value for name, value in components.items()},
    }


def advantage_metrics(batch: TokenBatch) -> Metrics:
    """Return statistics of advantages, returns and (with a critic) values at the loss tokens."""
    mask = batch.tokens["loss_mask"]
    metrics: Metrics = {}
    for name in ("advantages", "returns", "values"):
        if name in batch.tokens:
            metrics |= min_mean_max(f"critic/{name}", batch.tokens[name][mask])
    if "all_wrong" in batch.rows:
        metrics[ALL_WRONG] = float(batch.rows["all_wrong"].float().mean())
        metrics[ALL_WRONG_UPDATE] = all_wrong_share(batch)
    return metrics


def all_wrong_share(batch: TokenBatch) -> float:
    """Return the share that groups without a right answer have of Σ |advantage| at loss tokens."""
    mass = batch.tokens["advantages"].double().abs() * batch.tokens["loss_mask"]
    wrong = batch.rows["all_wrong"].repeat_interleave(batch.lengths)
    return float(mass[wrong].sum() / mass.sum()) if mass.any() else 0.0


def performance_metrics(batch: TokenBatch, timings: Timings, num_gpus: int) -> Metrics:
    """Return the step's throughput, device memory, seconds by phase, and share of busy time."""
    return {
        **throughput_metrics(batch, timings, num_gpus),
        **busy_metrics(timings),
        **timings.metrics(),
    }


def busy_metrics(timings: Timings) -> Metrics:
    """Return the share of the step's time in which the trainer did not wait for engines."""
    waits = timings.seconds["gen"] + timings.seconds.get("update_weights/wait", 0.0)
    return {"perf/trainer_busy_share": 1.0 - waits / max(timings.elapsed, 1e-9)}


def throughput_metrics(batch: TokenBatch, timings: Timings, num_gpus: int) -> Metrics:
    """Return the step's tokens: in total, per second of its phases, and per GPU-second."""
    tokens = float(batch.num_tokens)
    return {
        "perf/total_num_tokens": tokens,
        "perf/shared_token_share": saved_token_share(batch),
        "perf/throughput": tokens / max(timings.phases_total, 1e-9),
        "perf/tokens_per_second_per_gpu": tokens / max(timings.elapsed, 1e-9) / num_gpus,
    }


def validation_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> Metrics:
    """Return the means of score, components and agent's counts, over all rows and per data source.

    `val/score` is the score itself; `val/em` and others are components.
    """
    rows = [
        {**r.components, "score": r.score, **{f"env/{k}": v for k, v in t.stats.items()}}
        for t, r in zip(trajectories, rewards, strict=True)
    ]
    sources = [t.prompt.data_source for t in trajectories]
    metrics = {f"val/{name}": value for name, value in mean_by_key(rows).items()}
    for source in dict.fromkeys(sources):
        source_rows = [row for row, s in zip(rows, sources, strict=True) if s == source]
        metrics |= {f"val/{source}/{key}": v for key, v in mean_by_key(source_rows).items()}
    return {**metrics, "val/num_rows": float(len(rows))}
