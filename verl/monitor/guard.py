"""The collapse guard: what it measures and bounds, which checkpoints it trusts, what it then does.

A run with tools seldom ends in an error. The policy forgets its tags, calls no tool, never
answers or repeats itself, and the score follows some steps later. Each row of `RULES` bounds one
metric, absolutely or relative to a baseline: its median over the latest healthy steps. One step
beyond a bound is a warning, `patience` of them in a row are a collapse.

A checkpoint is healthy when the guard had nothing to say in the `patience` steps that followed it:
they sampled with its weights and learned from there. Its folder is then marked `HEALTHY`. What a
run under `action=rollback` starts from, and what it goes on from, is trusted at once.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint import folders
from verl.config import GuardConfig
from verl.core_algos.kl import kl_penalty
from verl.errors import CollapseError
from verl.types import TokenBatch

logger = logging.getLogger(__name__)

DRIFT = "guard/log_prob_drift"
SHIFT = "guard/policy_shift"
MALFORMED = "guard/malformed_rate"
TOOL_USE = "guard/search_rate"
"""Share of trajectories with a tool call; the name is from when there was one tool."""
NO_ANSWER = "guard/no_answer_rate"
LENGTH_CLIP = "guard/length_clip_rate"
ENTROPY = "actor/entropy"
GRAD_NORM = "actor/grad_norm"
SKIPPED = "actor/skipped_updates"


class Kind(StrEnum):
    """How a rule's limit bounds its metric."""

    DROP = "at least minus the limit"
    CEILING = "at most the limit"
    RISE = "at most the baseline plus the limit"
    GROWTH = "at most the limit times the baseline"
    SHARE = "at least the limit times the baseline"


LEAST = (Kind.DROP, Kind.SHARE)
"""Those whose bound is the least allowed, rather than the most."""


@dataclass(frozen=True)
class Rule:
    """One bound on one metric."""

    name: str
    """The option of `trainer.guard` that sets the limit."""
    metric: str
    kind: Kind
    patience: int | None = None
    """Steps in a row beyond the bound that make a collapse; None is the option's."""
    limit: float = 0.0

    def bound(self, baseline: float | None) -> float | None:
        """The most or least allowed; None while a relative rule has nothing to compare with."""
        if self.kind is Kind.DROP:
            return -self.limit
        if self.kind is Kind.CEILING:
            return self.limit
        if baseline is None or (baseline == 0.0 and self.kind is Kind.GROWTH):
            return None  # any gradient is beyond a multiple of none
        return baseline + self.limit if self.kind is Kind.RISE else baseline * self.limit

    def is_broken(self, value: float, bound: float | None) -> bool:
        """Whether `value` is beyond the bound; what is not finite always is."""
        if not math.isfinite(value) or bound is None:
            return not math.isfinite(value)
        return value < bound if self.kind in LEAST else value > bound

    def reason(self, value: float, baseline: float | None, count: int) -> str:
        """`METRIC is VALUE, above BOUND (RULE, baseline …), step 1 of 3`."""
        bound, side = self.bound(baseline), "below" if self.kind in LEAST else "above"
        limit = "not finite" if bound is None or not math.isfinite(value) else f"{side} {bound:.3g}"
        known = "" if baseline is None else f", baseline {baseline:.3g}"
        return (
            f"{self.metric} is {value:.3g}, {limit} (rule {self.name}{known}), "
            f"step {count} of {self.patience}"
        )


# Rules about the updates themselves need less patience than those about what is sampled later.
RULES = (
    Rule("drift_drop", DRIFT, Kind.DROP),
    Rule("drift_crash", DRIFT, Kind.DROP, patience=1),
    Rule("shift_bound", SHIFT, Kind.CEILING, patience=2),
    Rule("malformed_rise", MALFORMED, Kind.RISE),
    Rule("no_answer_rise", NO_ANSWER, Kind.RISE),
    Rule("length_clip_rise", LENGTH_CLIP, Kind.RISE),
    Rule("search_share", TOOL_USE, Kind.SHARE),
    Rule("entropy_share", ENTROPY, Kind.SHARE),
    Rule("entropy_rise", ENTROPY, Kind.RISE),
    Rule("grad_norm_growth", GRAD_NORM, Kind.GROWTH),
    Rule("skipped_updates", SKIPPED, Kind.CEILING),
)


def rules(config: GuardConfig) -> list[Rule]:
    """The rules of a run: those whose limit is not null."""
    limits = [(rule, getattr(config, rule.name)) for rule in RULES]
    patience = config.patience
    return [
        replace(rule, limit=limit, patience=min(rule.patience or patience, patience))
        for rule, limit in limits
        if limit is not None
    ]


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a step: it is healthy where there are no reasons."""

    reasons: tuple[str, ...] = ()
    """One for each broken rule: metric, value, bound, baseline, how often in a row."""
    is_collapsed: bool = False
    """A rule was broken for as many steps as its patience; else a reason is a warning."""

    @property
    def health(self) -> str:
        """In a word."""
        return "collapsed" if self.is_collapsed else "warning" if self.reasons else "healthy"

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass
class CollapseGuard:
    """Verdicts, trusted checkpoints and rollbacks of one run; `directory` holds its checkpoints."""

    config: GuardConfig
    directory: Path
    settle: Callable[[], None] = lambda: None
    """Waits for a checkpoint that is still being written."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Each watched metric at the latest healthy steps, oldest first."""
    broken: dict[str, int] = field(default_factory=dict)
    """How many steps in a row each rule was broken."""
    pending: list[int] = field(default_factory=list)
    """Steps of checkpoints that are not proven yet, in order."""
    healthy: int | None = None
    """Step of the last healthy checkpoint."""
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self.rules = rules(self.config)

    def judge(self, step: int, metrics: dict[str, float]) -> Verdict:
        """The verdict on a step, which is logged, added to `metrics`, and proves checkpoints."""
        if not self.config.enable:
            return Verdict()
        verdict = self.observe(metrics)
        metrics["guard/health"] = float(bool(verdict.reasons) + verdict.is_collapsed)
        metrics["guard/rollbacks"] = float(self.rollbacks)
        for reason in verdict.reasons:
            logger.warning("guard: step %d: %s: %s", step, verdict.health, reason)
        if verdict.reasons:
            self.pending.clear()
        while self.pending and step - self.pending[0] >= self.config.patience:
            self.mark_healthy(self.pending[0])
        return verdict

    def observe(self, metrics: Mapping[str, float]) -> Verdict:
        """The verdict on one step's metrics; steps come in order.

        A metric that a step lacks (no correct trajectory, no update) is not judged, and the count
        of its rules stays as it is.
        """
        reasons, is_collapsed = [], False
        for rule in self.rules:
            if (value := metrics.get(rule.metric)) is None:
                continue
            baseline = self.baseline(rule.metric)
            if not rule.is_broken(value, rule.bound(baseline)):
                self.broken.pop(rule.name, None)
                continue
            count = self.broken[rule.name] = self.broken.get(rule.name, 0) + 1
            is_collapsed |= count >= (rule.patience or 1)
            reasons.append(rule.reason(value, baseline, count))
        if not reasons:
            for metric in {rule.metric for rule in self.rules} & metrics.keys():
                values = [*self.history.get(metric, []), metrics[metric]]
                self.history[metric] = values[-self.config.baseline_steps :]
        return Verdict(tuple(reasons), is_collapsed)

    def baseline(self, metric: str) -> float | None:
        """Median over the latest healthy steps; None before the first."""
        values = self.history.get(metric)
        return statistics.median(values) if values else None

    def add_pending(self, step: int) -> None:
        """A checkpoint of `step` is being written; the next steps will prove it."""
        self.pending.append(step)

    def mark_healthy(self, step: int) -> None:
        """Take the checkpoint of `step` for healthy from now on, if it is there."""
        self.settle()
        self.drop_pending(step)
        if self._exists(step):
            self.healthy = step
            folders.mark_healthy(folders.step_folder(self.directory, step))

    def drop_pending(self, step: int) -> None:
        """The checkpoint of `step` is not there, or needs no proof any more."""
        self.pending = [pending for pending in self.pending if pending != step]

    @property
    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints must stay: the healthy one, and the next one to be proven."""
        found = {self.pending[0]} if self.pending else set()
        return found if self.healthy is None else {*found, self.healthy}

    @property
    def needs_initial_checkpoint(self) -> bool:
        """The run must save what it starts from: a rollback could have to go there."""
        rolls_back = self.config.enable and self.config.action == "rollback"
        return rolls_back and self.healthy is None

    @property
    def lr_scale(self) -> float:
        """Share of the configured learning rates that is left after the rollbacks so far."""
        return self.config.rollback_lr_factor**self.rollbacks

    def requires_action(self, verdict: Verdict) -> bool:
        """Whether the run cannot just go on."""
        return verdict.is_collapsed and self.config.action != "warn"

    def roll_back(self, step: int, verdict: Verdict) -> Path:
        """The checkpoint to go on from; counts the rollback.

        Raises CollapseError under `action=stop`, and when the rollbacks are used up.
        """
        if self.config.action != "rollback" or self.rollbacks >= self.config.max_rollbacks:
            raise CollapseError(self._message(step, verdict))
        assert self.healthy is not None, "a run that may roll back has saved what it started from"
        self.rollbacks += 1
        self.broken.clear()  # the baselines stay
        self.pending.clear()
        folder = folders.step_folder(self.directory, self.healthy)
        logger.warning("guard: step %d: back to %s, learning rates x %.3g (rollback %d of %d)",
                       step, folder, self.lr_scale, self.rollbacks,
                       self.config.max_rollbacks)  # fmt: skip
        return folder

    def _message(self, step: int, verdict: Verdict) -> str:
        """What happened, where the healthy weights are, and how to go on."""
        spent = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
        lower = "a lower actor_rollout_ref.actor.optim.lr"
        advice = (f"no checkpoint is known to be healthy: start anew with {lower}, and "
                  "trainer.save_freq to have checkpoints")  # fmt: skip
        if self.healthy is not None:
            folder = folders.step_folder(self.directory, self.healthy)
            advice = (f"the last healthy checkpoint is {folder}; go on from it with "
                      f"trainer.resume_mode={folder} and {lower}")  # fmt: skip
        return f"the policy collapsed at step {step}{spent}: {verdict}; {advice}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        names = ("history", "broken", "pending", "healthy", "rollbacks")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, as far as the checkpoints are still here."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.broken = dict(state["broken"])
        self.pending = [step for step in state["pending"] if self._exists(step)]
        healthy = state["healthy"]
        self.healthy = None if healthy is None or not self._exists(healthy) else healthy
        self.rollbacks = state["rollbacks"]

    def _exists(self, step: int) -> bool:
        return folders.is_complete(folders.step_folder(self.directory, step))


def correct_sequences(scores: Tensor, limit: int) -> list[int]:
    """Indices of at most `limit` correct trajectories, evenly over the batch.

    Correct is a positive score of at least half the batch's best, `scores` (num_seqs,).
    """
    if not len(scores):
        return []
    found = torch.nonzero((scores > 0) & (scores >= scores.max() / 2)).flatten().tolist()
    chosen = min(limit, len(found))
    return [found[i * len(found) // chosen] for i in range(chosen)]


def correct_trajectories(batch: TokenBatch, limit: int) -> TokenBatch:
    """The correct trajectories to look at again, with the columns that a forward needs only.

    None of an engine that does not tell log-probs: there is nothing to compare with.
    """
    chosen = batch.select(correct_sequences(batch.rows["scores"], limit))
    sampled = chosen.sequences("rollout_log_probs")
    chosen = chosen.select([i for i, x in enumerate(sampled) if not bool(x.isnan().any())])
    names = ("input_ids", "policy_mask", "rollout_log_probs")
    return TokenBatch(chosen.offsets, {name: chosen.tokens[name] for name in names})


def drift_and_shift(sampled: TokenBatch, log_probs: Tensor) -> tuple[float, float]:
    """How far the policy tokens' log-probs moved since the engine sampled them, in nats.

    `log_probs` (num_tokens,) are those of the policy after the updates. The drift is the mean of
    log π_after − log π_engine; the shift is KL(π_engine ‖ π_after) by k3, not negative: where some
    tokens gain what others lose, the drift is near 0 and the shift is not.
    """
    mask = sampled.tokens["policy_mask"]
    moved = (log_probs - sampled.tokens["rollout_log_probs"])[mask].double()
    shift = kl_penalty(-moved, torch.zeros_like(moved), "k3")
    return float(moved.mean()), float(shift.mean())
