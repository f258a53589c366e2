"""The collapse guard: detects a collapsing policy, and marks healthy checkpoints.

A training run with tools rarely collapses with an error. The policy forgets its tags, calls no
tool, never answers or repeats itself, and the score drops some steps later. Each entry of `RULES`
bounds one metric, absolutely or relative to a baseline: the metric's median over the latest healthy
steps. One step beyond a bound is a warning; `patience` such steps in a row are a collapse.

A checkpoint is healthy if the `patience` steps after it raised no warning: they sampled with its
weights and continued training from them. Its folder is then marked `HEALTHY`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import ROW_STARTS, TokenBatch
from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import Watcher
from verl.config import Config, GuardConfig
from verl.config.trainer import PATIENCE
from verl.core_algos.kl import kl_penalty
from verl.errors import CollapseError, MismatchError, did_you_mean, explain
from verl.rewards.interface import Reward
from verl.trainer.hooks import Hook
from verl.types import Metrics, Origin, Segment, Status, Trajectory, num_calls

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

HEALTHY = "HEALTHY"
"""File in the folder of a healthy checkpoint."""
MALFORMED = "guard/malformed_rate"
TOOL_USE = "guard/search_rate"
"""Share of trajectories with a tool call; the name is from when there was one tool."""
NO_ANSWER = "guard/no_answer_rate"
LENGTH_CLIP = "guard/length_clip_rate"
TURN_TOKENS, REPETITION = "guard/turn_tokens", "guard/repetition"
"""What the policy writes, which is mostly reasoning: tokens a turn, and share of repeated ones."""
DRIFT = "guard/log_prob_drift"
SHIFT = "guard/policy_shift"
SCORE_GAP = "guard/score_gap"
ENTROPY = "actor/entropy"
GRAD_NORM = "actor/grad_norm"
SKIPPED = "actor/skipped_updates"
MISMATCH = "actor/rollout_mismatch"
EMPTY_RESULTS, BLANK_RESULTS = "env/empty_result_share", "env/blank_result_share"
"""What tools gave: mean shares of calls without a result, and of results without text."""
OF_TOOLS = (EMPTY_RESULTS, BLANK_RESULTS)
BASELINE_STEPS = 10
"""Latest healthy steps whose median is the baseline of relative limits."""
WINDOW = 8
"""Tokens in a row that count as repeated; tags and a query's words recur in shorter ones."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: the base of a window's hash, modulo 2^64."""
DRIFT_TRAJECTORIES = 16
"""Correct trajectories per step whose log-probs are computed again after the update."""


class Kind(StrEnum):
    """How a rule's limit bounds its metric."""

    DROP = "at least minus the limit"
    CEILING = "at most the limit"
    RISE = "at most the baseline plus the limit"
    GROWTH = "at most the limit times the baseline"
    SHARE = "at least the limit times the baseline"


LOWER_BOUNDS = (Kind.DROP, Kind.SHARE)
"""Kinds whose bound is a minimum; the others bound a maximum."""


@dataclass(frozen=True)
class Rule:
    """One bound on one metric."""

    name: str
    """Key of `trainer.guard.limits` that sets another limit."""
    metric: str
    kind: Kind
    limit: float
    patience: int | None = None
    """Steps in a row beyond the bound that count as a collapse; None: `trainer.guard.patience`."""

    def bound(self, baseline: float | None) -> float | None:
        """Return the allowed maximum or minimum; None while a relative rule lacks a baseline."""
        if self.kind is Kind.DROP:
            return 0.0 - self.limit  # not -0.0
        if self.kind is Kind.CEILING:
            return self.limit
        if baseline is None or (baseline == 0.0 and self.kind is Kind.GROWTH):
            return None  # any gradient norm would exceed a multiple of 0
        return baseline + self.limit if self.kind is Kind.RISE else baseline * self.limit

    def is_broken(self, value: float, bound: float | None) -> bool:
        """Return whether `value` is beyond the bound; a value that is not finite always is."""
        if not math.isfinite(value):
            return True
        if bound is None:
            return False
        return value < bound if self.kind in LOWER_BOUNDS else value > bound

    def reason(self, value: float, baseline: float | None, count: int) -> str:
        """Return `METRIC is VALUE, above BOUND (RULE, baseline …), step 1 of 3`."""
        bound = self.bound(baseline)
        side = "below" if self.kind in LOWER_BOUNDS else "above"
        limit = "not finite" if bound is None or not math.isfinite(value) else f"{side} {bound:.3g}"
        compared = "" if baseline is None else f", baseline {baseline:.3g}"
        return (
            f"{self.metric} is {value:.3g}, {limit} (rule {self.name}{compared}), "
            f"step {count} of {self.patience}"
        )


# Rules on the updates themselves need less patience than rules on the samples that follow them.
RULES = (
    Rule("mismatch_bound", MISMATCH, Kind.CEILING, 0.5, patience=1),
    Rule("drift_drop", DRIFT, Kind.DROP, 0.3),
    Rule("drift_crash", DRIFT, Kind.DROP, 1.0, patience=1),
    Rule("shift_bound", SHIFT, Kind.CEILING, 0.01, patience=2),
    Rule("shift_crash", SHIFT, Kind.CEILING, 0.05, patience=1),
    Rule("score_gap_drop", SCORE_GAP, Kind.DROP, 0.0),
    Rule("malformed_rise", MALFORMED, Kind.RISE, 0.3),
    Rule("no_answer_rise", NO_ANSWER, Kind.RISE, 0.3),
    Rule("length_clip_rise", LENGTH_CLIP, Kind.RISE, 0.3),
    Rule("turn_tokens_growth", TURN_TOKENS, Kind.GROWTH, 3.0),
    Rule("turn_tokens_share", TURN_TOKENS, Kind.SHARE, 0.2),
    Rule("repetition_rise", REPETITION, Kind.RISE, 0.3),
    Rule("search_share", TOOL_USE, Kind.SHARE, 0.1),
    Rule("entropy_share", ENTROPY, Kind.SHARE, 0.1),
    Rule("entropy_rise", ENTROPY, Kind.RISE, 1.0),
    Rule("grad_norm_growth", GRAD_NORM, Kind.GROWTH, 10.0),
    Rule("skipped_updates", SKIPPED, Kind.CEILING, 0.0),
    Rule("empty_results", EMPTY_RESULTS, Kind.CEILING, 0.9),
    Rule("blank_results", BLANK_RESULTS, Kind.CEILING, 0.5),
)


def rules(config: GuardConfig) -> list[Rule]:
    """Return the rules of a run: all rules whose limit is not null."""
    limits = [(rule, config.limits.get(rule.name, rule.limit)) for rule in RULES]
    patience = config.patience
    return [
        replace(rule, limit=limit, patience=min(rule.patience or patience, patience))
        for rule, limit in limits
        if limit is not None
    ]


def problems(config: Config) -> Iterator[str]:
    """Yield an error for each limit of an unknown rule, and for each that is no limit."""
    known = {rule.name: rule.limit for rule in RULES}
    for name, limit in config.trainer.guard.limits.items():
        key = f"trainer.guard.limits.{name}"
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if name == PATIENCE:
            if not (is_number and isinstance(limit, int) and limit >= 1):
                yield explain(key, repr(limit), "1 or more steps", f"{key}=3, the default")
        elif name not in known:
            fix = did_you_mean(name, known, "leave it out")
            yield explain(key, repr(limit), f"a rule: {', '.join(known)}", fix)
        elif limit is not None and not (is_number and 0 <= limit < math.inf):
            fix = f"{key}={known[name]}, the default"
            yield explain(key, repr(limit), "a number of 0 or more, or null", fix)


@dataclass(frozen=True)
class Verdict:
    """The guard's verdict on one step: healthy if there are no reasons."""

    reasons: tuple[str, ...] = ()
    """One for each broken rule: metric, value, bound, baseline and number of steps in a row."""
    is_collapsed: bool = False
    """Whether a rule was broken for as many steps as its patience; otherwise reasons only warn."""
    broken: frozenset[str] = frozenset()
    """The metrics beyond a bound."""

    @property
    def is_mismatch(self) -> bool:
        """Whether engines and trainer disagree, which explains whatever other rules found."""
        return MISMATCH in self.broken

    @property
    def health(self) -> str:
        """`mismatch`, `collapsed`, `warning` or `healthy`."""
        if self.is_mismatch:
            return "mismatch"
        return "collapsed" if self.is_collapsed else "warning" if self.reasons else "healthy"

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class HealthyMarks(Watcher):
    """Keeps the newest checkpoint that a guard marked, also in a run without one."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the run's folder."""
        self.directory = directory

    @property
    def protected_steps(self) -> set[int]:
        """The newest marked step, if there is one."""
        return newest_marked(self.directory)


def newest_marked(directory: Path) -> set[int]:
    """Return the step of the newest checkpoint that is marked as healthy, if there is one."""
    marked = [path for path in folders.all_complete(directory) if (path / HEALTHY).exists()]
    return {folders.step_of(path) for path in marked[-1:]}


@dataclass
class CollapseGuard(Hook, Watcher):
    """Verdicts and healthy checkpoints of one run with checkpoints in `directory`."""

    config: GuardConfig
    directory: Path
    settle: Callable[[], None] = lambda: None
    """Waits until a checkpoint in progress has been written."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Values of each monitored metric at the latest healthy steps, oldest first."""
    broken: dict[str, int] = field(default_factory=dict)
    """Number of steps in a row for which each rule has been broken."""
    pending: list[int] = field(default_factory=list)
    """Steps of checkpoints not known to be healthy yet, in order."""
    healthy: int | None = None
    """Step of the last healthy checkpoint."""
    _measured: Metrics = field(init=False, default_factory=dict)
    """Drift and shift of the current step."""

    def __post_init__(self) -> None:
        self.rules = rules(self.config)
        self._measures = bool({DRIFT, SHIFT} & {rule.metric for rule in self.rules})

    def on_updated(self, trainer: RayPPOTrainer) -> None:
        """Measure how the updates changed log-probs of some correct trajectories."""
        batch, timings = trainer.current.batch, trainer.current.timings
        assert batch is not None
        self._measured = {}
        if not self._measures:
            return
        with timings.phase("guard"):
            correct = correct_trajectories(batch, DRIFT_TRAJECTORIES)
            if len(correct):
                log_probs = trainer.ranks.begin_forward("actor", correct)()
                drift, shift = drift_and_shift(correct, log_probs)
                self._measured = {DRIFT: drift, SHIFT: shift}

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Judge the step; raises CollapseError or MismatchError once its metrics are logged."""
        metrics |= self._measured | score_gap(trainer.current.samples.rewards)
        verdict = self.judge(trainer.step, metrics)
        try:
            self.require_health(trainer.step, verdict)
        except (CollapseError, MismatchError):
            trainer.log(metrics)
            raise

    def judge(self, step: int, metrics: dict[str, float]) -> Verdict:
        """Judge a step: log the verdict, add it to `metrics` and mark checkpoints it confirms."""
        verdict = self.observe(metrics)
        metrics["guard/health"] = float(bool(verdict.reasons) + verdict.is_collapsed)
        for reason in verdict.reasons:
            logger.warning("guard: step %d: %s: %s", step, verdict.health, reason)
        if verdict.reasons:
            self.pending.clear()
        while self.pending and step - self.pending[0] >= self.config.patience:
            self.mark_healthy(self.pending[0])
        return verdict

    def observe(self, metrics: Mapping[str, float]) -> Verdict:
        """Return the verdict on one step's metrics; steps must be given in order.

        A metric that the step lacks (no correct trajectory, no update) leaves its rules' counts.
        """
        reasons, is_collapsed, broken = [], False, set[str]()
        for rule in self.rules:
            if (value := metrics.get(rule.metric)) is None:
                continue
            baseline = self.baseline(rule.metric)
            if not rule.is_broken(value, rule.bound(baseline)):
                self.broken.pop(rule.name, None)
                continue
            count = self.broken[rule.name] = self.broken.get(rule.name, 0) + 1
            is_collapsed |= count >= (rule.patience or 1)
            broken.add(rule.metric)
            reasons.append(rule.reason(value, baseline, count))
        if not reasons:
            for metric in {rule.metric for rule in self.rules} & metrics.keys():
                values = [*self.history.get(metric, []), metrics[metric]]
                self.history[metric] = values[-BASELINE_STEPS:]
        return Verdict(tuple(reasons), is_collapsed, frozenset(broken))

    def baseline(self, metric: str) -> float | None:
        """Return the median over the latest healthy steps; None before the first such step."""
        values = self.history.get(metric)
        return statistics.median(values) if values else None

    def on_saving(self, step: int) -> dict[str, Any]:
        """Record that a checkpoint of `step` is being written; later steps decide on its health."""
        self.pending.append(step)
        return self.state_dict()

    def mark_healthy(self, step: int) -> None:
        """Mark the checkpoint of `step` as healthy, if it exists."""
        self.settle()
        self.drop_pending(step)
        if self._exists(step):
            self.healthy = step
            (folders.step_folder(self.directory, step) / HEALTHY).touch()

    def drop_pending(self, step: int) -> None:
        """Remove the checkpoint of `step` from the pending ones: it is lost, or known healthy."""
        self.pending = [pending for pending in self.pending if pending != step]

    @property
    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints must be kept: the last healthy one and the oldest pending one."""
        steps = {*self.pending[:1], *newest_marked(self.directory)}
        return steps if self.healthy is None else {*steps, self.healthy}

    def require_health(self, step: int, verdict: Verdict) -> None:
        """With `action=stop`, raise CollapseError after a collapse.

        Raises MismatchError instead if engines and trainer disagree, which explains the rest.
        """
        if not verdict.is_collapsed or self.config.action == "warn":
            return
        if verdict.is_mismatch:
            raise MismatchError(self._mismatch_message(step, verdict))
        raise CollapseError(self._message(step, verdict))

    def _mismatch_message(self, step: int, verdict: Verdict) -> str:
        return (
            f"engines and trainer compute different log-probs of the same tokens at step {step}: "
            f"{verdict}; the policy did not collapse: an engine has other weights, or one of them "
            "computes this model differently (docs/guides/guard.md)"
        )

    def _message(self, step: int, verdict: Verdict) -> str:
        if verdict.broken.intersection(OF_TOOLS):
            fix = "correct what their servers serve, then continue with trainer.resume_mode=auto"
            return f"the tools give the policy nothing at step {step}: {verdict}; {fix}"
        if SCORE_GAP in verdict.broken:
            fix = "correct the reward, then continue from a checkpoint before it, or start again"
            return f"right answers score below wrong ones at step {step}: {verdict}; {fix}"
        lower = "a lower actor_rollout_ref.actor.optim.lr"
        advice = (f"no checkpoint is known to be healthy: start again with {lower}, and "
                  "with trainer.save_freq to have checkpoints")  # fmt: skip
        if self.healthy is not None:
            folder = folders.step_folder(self.directory, self.healthy)
            advice = (f"the last healthy checkpoint is {folder}; continue from it with "
                      f"trainer.resume_mode={folder} and {lower}")  # fmt: skip
        return f"the policy collapsed at step {step}: {verdict}; {advice}"

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint, as JSON values."""
        names = ("history", "broken", "pending", "healthy")
        return {"guard": {name: getattr(self, name) for name in names}}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Restore the state, if the checkpoint has one; ignores checkpoints that are gone."""
        if "guard" in state.others:
            self.load_state_dict(state.others["guard"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `guard` in `state_dict`."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.broken = dict(state["broken"])
        self.pending = [step for step in state["pending"] if self._exists(step)]
        healthy = state["healthy"]
        self.healthy = None if healthy is None or not self._exists(healthy) else healthy

    def _exists(self, step: int) -> bool:
        return folders.is_complete(folders.step_folder(self.directory, step))


def hook(parts: Parts) -> CollapseGuard | None:
    """Return the guard of a run, which follows the checkpoints; None with `action=off`."""
    config, saver = parts.config, parts.saver
    options = config.trainer.guard
    if options.action == "off":
        saver.watchers.append(HealthyMarks(parts.directory))
        return None
    if not config.samples_rollouts:  # the policy moves away from recorded trajectories
        options = replace(options, limits={**options.limits, "mismatch_bound": None})
    guard = CollapseGuard(options, parts.directory, saver.finish_pending)
    saver.watchers.append(guard)
    return guard


def measure(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the policy's behaviour, as shares of turns or trajectories; also with `action=off`.

    Failed trajectories are ignored. Shares of counts that the agent does not report are left out.
    """
    completed = [t for t in trajectories if t.status is not Status.FAILED]
    if not completed:
        return {}
    metrics = {NO_ANSWER: float(np.mean([t.status is not Status.ANSWERED for t in completed]))}
    if all("valid_actions" in t.stats for t in completed):
        metrics[TOOL_USE] = float(np.mean([num_calls(t.stats) > 0 for t in completed]))
    turns = sum(t.stats.get("turns", 0.0) for t in completed)
    for metric, count in ((MALFORMED, "malformed_turns"), (LENGTH_CLIP, "truncated_turns")):
        if turns and all(count in t.stats for t in completed):
            metrics[metric] = sum(t.stats[count] for t in completed) / turns
    written = [[s for s in t.segments if s.origin is Origin.POLICY] for t in completed]
    if num_turns := sum(map(len, written)):
        metrics[TURN_TOKENS] = sum(t.num_policy_tokens for t in completed) / num_turns
        metrics[REPETITION] = float(np.mean([repetition(turns) for turns in written if turns]))
    return metrics


def score_gap(rewards: Sequence[Reward]) -> Metrics:
    """Return by how much the mean score of right answers exceeds that of wrong ones.

    Empty if an outcome is unknown, or all are alike.
    """
    scores = {is_right: [r.score for r in rewards if r.is_right is is_right]
              for is_right in (True, False)}  # fmt: skip
    if not all(scores.values()) or sum(map(len, scores.values())) < len(rewards):
        return {}
    return {SCORE_GAP: float(np.mean(scores[True]) - np.mean(scores[False]))}


def repetition(turns: Sequence[Segment]) -> float:
    """Return the share of a policy's windows of `WINDOW` tokens that it has written before."""
    packed = b"".join(turn.column_bytes("ids") for turn in turns)
    ids = np.frombuffer(packed, dtype=np.int32).astype(np.uint64)
    if len(ids) < WINDOW:
        return 0.0
    count = len(ids) - WINDOW + 1
    hashes = np.zeros(count, dtype=np.uint64)  # sorted sooner than rows of ids
    for start in range(WINDOW):
        hashes = hashes * HASH_FACTOR + ids[start : start + count]
    return 1.0 - len(np.unique(hashes)) / count


def correct_sequences(scores: Tensor, limit: int) -> list[int]:
    """Return indices of at most `limit` correct trajectories, spread evenly over the batch.

    A trajectory is correct if its entry of `scores` (num_seqs,) is positive and at least half the
    batch's best.
    """
    if not len(scores):
        return []
    correct = torch.nonzero((scores > 0) & (scores >= scores.max() / 2)).flatten().tolist()
    count = min(limit, len(correct))
    return [correct[i * len(correct) // count] for i in range(count)]


def correct_trajectories(batch: TokenBatch, limit: int) -> TokenBatch:
    """Return up to `limit` correct trajectories, with only the columns a forward pass needs.

    Trajectories without engine log-probs are left out: there is nothing to compare with.
    """
    chosen = batch.select(correct_sequences(batch.rows["scores"], limit))
    sampled = chosen.sequences("rollout_log_probs")
    chosen = chosen.select([i for i, x in enumerate(sampled) if not bool(x.isnan().any())])
    names = ("input_ids", "policy_mask", "rollout_log_probs", ROW_STARTS)
    columns = {name: chosen.tokens[name] for name in names if name in chosen.tokens}
    return TokenBatch(chosen.offsets, columns)


def drift_and_shift(sampled: TokenBatch, log_probs: Tensor) -> tuple[float, float]:
    """Return how far the policy tokens' log-probs moved since sampling: drift and shift, in nats.

    `log_probs` (num_tokens,): log-probs under the policy after the updates. The drift is the mean
    of log π_after − log π_engine; the shift is KL(π_engine ‖ π_after) by the k3 estimator and never
    negative. Where some tokens gain what others lose, the drift is near 0 but the shift is not.
    """
    mask = sampled.tokens["policy_mask"]
    moved = (log_probs - sampled.tokens["rollout_log_probs"])[mask].double()
    shift = kl_penalty(-moved, torch.zeros_like(moved), "k3")
    return float(moved.mean()), float(shift.mean())
