"""Metrics of one training step, computed from its trajectories, batch and clocks. No I/O here."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from verl.data.trajectories import num_calls
from verl.monitor.guard import LENGTH_CLIP, MALFORMED, NO_ANSWER, TOOL_USE
from verl.monitor.performance import Timings as Timings
from verl.packing import saved_token_share
from verl.rewards.interface import Reward
from verl.types import EngineCounts, Metrics, Origin, Status, TokenBatch, Trajectory


def spread(name: str, values: Sequence[float] | Tensor) -> Metrics:
    """Mean, minimum and maximum of non-empty `values`."""
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/min": float(array.min()),
        f"{name}/max": float(array.max()),
    }


def mean_by_key(rows: Sequence[Mapping[str, float]]) -> Metrics:
    """Mean of each key over the rows that have it."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            columns[key].append(value)
    return {key: float(np.mean(values)) for key, values in columns.items()}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Lengths, endings and the agent's own counts, over all trajectories (failed ones too)."""
    lengths = [t.num_policy_tokens for t in trajectories]
    observed = [t.num_tokens_of(Origin.OBSERVATION) for t in trajectories]
    endings = {
        f"rollout/{status.value}": float(np.mean([t.status is status for t in trajectories]))
        for status in Status
    }
    return {
        **spread("response_length", lengths),
        **spread("observation_length", observed),
        "prompt_length/mean": float(np.mean([len(t.prompt.ids) for t in trajectories])),
        **endings,
        **{f"env/{k}": v for k, v in mean_by_key([t.stats for t in trajectories]).items()},
        **conduct_metrics(trajectories),
        **spared_metrics(trajectories),
        **wait_metrics(trajectories, time.time()),
        **engine_metrics(trajectories),
    }


def wait_metrics(trajectories: Sequence[Trajectory], now: float) -> Metrics:
    """Mean seconds that a trajectory waited for tools and weights between its turns, for a slot in
    its engine, and since its end for those that are taken with it at `now`; none where no turn was
    timed."""
    timed = [t.turn_times for t in trajectories if t.turn_times]
    if not timed:
        return {}
    tools = [sum(b.requested - a.finished for a, b in itertools.pairwise(turns)) for turns in timed]
    weights = [sum(turn.started - turn.requested for turn in turns) for turns in timed]
    others = [now - turns[-1].finished for turns in timed]
    slots = [sum(turn.queued_s for turn in turns) for turns in timed]
    waits = {"tools": tools, "weights": weights, "others": others}
    if any(slots):  # an engine told
        waits["slot"] = slots
    return {f"rollout/wait_s/{name}": float(np.mean(values)) for name, values in waits.items()}


def engine_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """What engines did not compute, as shares; none where they do not tell."""
    told = (turn.counts for one in trajectories for turn in one.turn_times)
    counts = sum(told, EngineCounts())
    shares = {
        "rollout/prefix_hit_share": (counts.cached, counts.prompt),
        "rollout/draft_accepted_share": (counts.accepted, counts.drafted),
    }
    return {name: part / whole for name, (part, whole) in shares.items() if whole}


def spared_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """`rollout/NAME_hidden_share` for seconds `NAME_s` that dialogues waited and `NAME_hidden_s`
    that they were spared."""
    seconds: Counter[str] = Counter()
    for trajectory in trajectories:
        seconds.update(trajectory.stats)
    names = [name.removesuffix("_hidden_s") for name in seconds if name.endswith("_hidden_s")]
    return {
        f"rollout/{name}_hidden_share": seconds[f"{name}_hidden_s"]
        / max(seconds[f"{name}_s"] + seconds[f"{name}_hidden_s"], 1e-9)
        for name in names
    }


def conduct_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """How the policy behaves, for the collapse guard: shares of turns and of trajectories.

    Failed trajectories do not count. A share whose counts the agent does not report is left out.
    """
    alive = [t for t in trajectories if t.status is not Status.FAILED]
    if not alive:
        return {}
    found = {NO_ANSWER: float(np.mean([t.status is not Status.ANSWERED for t in alive]))}
    if all("valid_actions" in t.stats for t in alive):
        found[TOOL_USE] = float(np.mean([num_calls(t.stats) > 0 for t in alive]))
    turns = sum(t.stats.get("turns", 0.0) for t in alive)
    for metric, count in ((MALFORMED, "malformed_turns"), (LENGTH_CLIP, "truncated_turns")):
        if turns and all(count in t.stats for t in alive):
            found[metric] = sum(t.stats[count] for t in alive) / turns
    return found


def reward_metrics(rewards: Sequence[Reward]) -> Metrics:
    """The score and each of its components."""
    components = mean_by_key([r.components for r in rewards])
    return {
        **spread("critic/score", [r.score for r in rewards]),
        **{f"reward/{name}": value for name, value in components.items()},
    }


def advantage_metrics(batch: TokenBatch) -> Metrics:
    """Advantages, returns and (with a critic) values at the tokens of the loss."""
    mask = batch.tokens["loss_mask"]
    names = [n for n in ("advantages", "returns", "values") if n in batch.tokens]
    found = {n: batch.tokens[n][mask] for n in names}
    return {k: v for n, values in found.items() for k, v in spread(f"critic/{n}", values).items()}


def staleness_metrics(batch: TokenBatch, version: int) -> Metrics:
    """By how many weight versions the policy's tokens are older than `version`, the trainer's."""
    versions = batch.tokens["weight_versions"][batch.tokens["policy_mask"]]
    ages, counts = np.unique(version - versions.numpy(), return_counts=True)
    shares = counts / max(1, counts.sum())
    mean = {"rollout/staleness/mean": float((ages * shares).sum())}
    return mean | {
        f"rollout/staleness/share_{age}": float(share)
        for age, share in zip(ages.tolist(), shares.tolist(), strict=True)
    }


def busy_metrics(timings: Timings, engines: float | None) -> Metrics:
    """The shares of a step in which the trainer, and the engines, had work."""
    waits = timings.seconds["gen"] + timings.seconds.get("update_weights/wait", 0.0)
    found = {"perf/trainer_busy_share": 1.0 - waits / max(timings.elapsed, 1e-9)}
    return found if engines is None else {**found, "perf/engine_busy_share": engines}


def throughput_metrics(batch: TokenBatch, timings: Timings, num_gpus: int) -> Metrics:
    """Tokens of the step, per second of its phases together, and of the whole step for a GPU."""
    tokens = float(batch.num_tokens)
    return {
        "perf/total_num_tokens": tokens,
        "perf/shared_token_share": saved_token_share(batch),
        "perf/throughput": tokens / max(timings.phases_total, 1e-9),
        "perf/tokens_per_second_per_gpu": tokens / max(timings.elapsed, 1e-9) / num_gpus,
    }


def validation_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> Metrics:
    """Mean score, its components and the agent's counts, over all rows and per data source.

    `val/score` is the reward's own score; `val/em` and others come from its components.
    """
    rows = [
        {"score": r.score, **r.components, **{f"env/{k}": v for k, v in t.stats.items()}}
        for t, r in zip(trajectories, rewards, strict=True)
    ]
    sources = [t.prompt.data_source for t in trajectories]
    metrics = {f"val/{name}": value for name, value in mean_by_key(rows).items()}
    for source in dict.fromkeys(sources):
        own = [row for row, s in zip(rows, sources, strict=True) if s == source]
        metrics |= {f"val/{source}/{name}": value for name, value in mean_by_key(own).items()}
    return {**metrics, "val/num_rows": float(len(rows))}
