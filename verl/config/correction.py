"""Settings of `actor.rollout_correction`, by which losses correct for tokens of other weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.bounds import Bounds
from verl.config.option import Limits
from verl.errors import did_you_mean, explain

KEY = "actor_rollout_ref.actor.rollout_correction"
LIMITS: Mapping[str, Limits] = {
    "rollout_is": Limits("logged", choices="verl.core_algos.mismatch:LEVELS"),
    "rollout_is_threshold": Limits("logged", Bounds(gt=0)),
    "rollout_mask": Limits("logged", choices=("token", "sequence", "geometric")),
    "rollout_mask_threshold": Limits("logged", Bounds(gt=1)),
    "rollout_mask_floor": Limits("logged", Bounds(ge=0, le=1)),
}


@dataclass(frozen=True)
class Correction:
    """Importance weights of trainer against engine probabilities, and a mask by their ratio."""

    rollout_is: str = "none"
    """Level of the weights: none, token, sequence (product over tokens) or geometric (mean)."""
    rollout_is_threshold: float = 2.0
    """Maximum importance weight; larger weights are clipped to it."""
    rollout_mask: str | None = None
    """Level of the ratio that decides which tokens are masked out; None is that of the weights."""
    rollout_mask_threshold: float | None = None
    """Mask tokens (sequences) with ratios above this or below the floor; None: none."""
    rollout_mask_floor: float | None = None
    """Minimum ratio that is not masked out; None is the inverse of the threshold."""

    @property
    def is_none(self) -> bool:
        """Whether nothing is weighted or masked."""
        return self.rollout_is == "none" and self.rollout_mask_threshold is None


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each setting that is unknown, or whose value is beyond its limits."""
    for name, value in given.items():
        if name not in LIMITS:
            fix = did_you_mean(name, LIMITS, "leave it out")
            yield explain(f"{KEY}.{name}", repr(value), f"one of {', '.join(LIMITS)}", fix)
            continue
        limits, default = LIMITS[name], getattr(Correction, name)
        kinds = str if limits.choices else (int, float)
        is_valid = isinstance(value, kinds) and not isinstance(value, bool) and limits.allows(value)
        if not is_valid and value != default:
            expected = limits.expected(value) or "a number"
            yield explain(f"{KEY}.{name}", repr(value), expected, "correct it, or leave it out")
