"""The collapse guard: reads a step's metrics and says whether the policy is still healthy.

A run with tools seldom ends in an error. The policy forgets its tags, calls no tool, never
answers or repeats itself, and the score follows some steps later. Each row of `rules` bounds one
metric, absolutely or relative to a baseline: its median over the latest healthy steps. One step
beyond a bound is a warning, `patience` of them in a row are a collapse. No I/O here: what follows
from a verdict is the business of `verl.monitor.guard`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from verl.config import GuardConfig

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


class Health(StrEnum):
    """What a step looks like."""

    HEALTHY = "healthy"
    WARNING = "warning"
    """Beyond a bound, not yet for as long as a collapse takes."""
    COLLAPSED = "collapsed"


class Kind(StrEnum):
    """How a rule's limit bounds its metric."""

    DROP = "at least minus the limit"
    CEILING = "at most the limit"
    RISE = "at most the baseline plus the limit"
    GROWTH = "at most the limit times the baseline"
    SHARE = "at least the limit times the baseline"


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

    @property
    def is_lower(self) -> bool:
        """The bound is the least allowed, rather than the most."""
        return self.kind in (Kind.DROP, Kind.SHARE)

    def bound(self, baseline: float | None) -> float | None:
        """The most or least allowed; None while a relative rule has nothing to compare with."""
        if self.kind in (Kind.DROP, Kind.CEILING):
            return -self.limit if self.is_lower else self.limit
        if baseline is None or (baseline == 0.0 and self.kind is Kind.GROWTH):
            return None  # any gradient is beyond a multiple of none
        return baseline + self.limit if self.kind is Kind.RISE else baseline * self.limit

    def is_broken(self, value: float, bound: float | None) -> bool:
        """Whether `value` is beyond the bound; what is not finite always is."""
        if not math.isfinite(value) or bound is None:
            return not math.isfinite(value)
        return value < bound if self.is_lower else value > bound


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
    return [
        replace(
            rule,
            limit=getattr(config, rule.name),
            patience=min(rule.patience or config.patience, config.patience),
        )
        for rule in RULES
        if getattr(config, rule.name) is not None
    ]


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a step."""

    health: Health = Health.HEALTHY
    reasons: tuple[str, ...] = ()
    """One for each broken rule: metric, value, bound, baseline, how often in a row."""

    @property
    def is_healthy(self) -> bool:
        return self.health is Health.HEALTHY

    @property
    def is_collapsed(self) -> bool:
        return self.health is Health.COLLAPSED

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass
class CollapseGuard:
    """Judges step after step; it keeps baselines and how often in a row each rule was broken."""

    config: GuardConfig
    history: dict[str, list[float]] = field(default_factory=dict)
    """Each watched metric at the latest healthy steps, oldest first."""
    broken: dict[str, int] = field(default_factory=dict)
    """Steps in a row, by rule."""

    def __post_init__(self) -> None:
        self.rules = rules(self.config)

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
            reasons.append(_reason(rule, value, baseline, count))
        if reasons:
            return Verdict(Health.COLLAPSED if is_collapsed else Health.WARNING, tuple(reasons))
        self._remember(metrics)
        return Verdict()

    def baseline(self, metric: str) -> float | None:
        """Median over the latest healthy steps; None before the first."""
        values = self.history.get(metric)
        return statistics.median(values) if values else None

    def _remember(self, metrics: Mapping[str, float]) -> None:
        for metric in {rule.metric for rule in self.rules} & metrics.keys():
            values = [*self.history.get(metric, []), metrics[metric]]
            self.history[metric] = values[-self.config.baseline_steps :]

    def restart(self) -> None:
        """Count anew from the same baselines, after a rollback."""
        self.broken.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"history": self.history, "broken": self.broken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.broken = dict(state["broken"])


def _reason(rule: Rule, value: float, baseline: float | None, count: int) -> str:
    """`METRIC is VALUE, above BOUND (RULE, baseline …), 1 of 3 steps`."""
    bound = rule.bound(baseline)
    side = "below" if rule.is_lower else "above"
    limit = "not finite" if bound is None or not math.isfinite(value) else f"{side} {bound:.3g}"
    known = "" if baseline is None else f", baseline {baseline:.3g}"
    return (
        f"{rule.metric} is {value:.3g}, {limit} (rule {rule.name}{known}), "
        f"step {count} of {rule.patience}"
    )
