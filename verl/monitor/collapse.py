"""The rules of the collapse guard: which metric of a step is bounded, and by what.

A run with tools seldom ends in an error. The policy forgets its tags, calls no tool, never
answers or repeats itself, and the score follows some steps later. Each row of `RULES` bounds one
metric, absolutely or relative to a baseline: its median over the latest healthy steps. One step
beyond a bound is a warning, `patience` of them in a row are a collapse (`verl.monitor.guard`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

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

    def reason(self, value: float, baseline: float | None, count: int) -> str:
        """`METRIC is VALUE, above BOUND (RULE, baseline …), step 1 of 3`."""
        bound = self.bound(baseline)
        side = "below" if self.is_lower else "above"
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
    return [
        replace(
            rule,
            limit=getattr(config, rule.name),
            patience=min(rule.patience or config.patience, config.patience),
        )
        for rule in RULES
        if getattr(config, rule.name) is not None
    ]
