"""Weights of `actor.terms`: further terms of the policy's update, beside any estimator."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.bounds import Bounds
from verl.errors import did_you_mean, explain

KEY = "actor_rollout_ref.actor.terms"
TERMS = ("llds", "sibling")
WEIGHTS = Bounds(ge=0, le=1000)


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each term that is unknown, or whose weight is not a number in bounds."""
    for name, value in given.items():
        if name not in TERMS:
            fix = did_you_mean(name, TERMS, "leave it out")
            yield explain(f"{KEY}.{name}", repr(value), f"one of {', '.join(TERMS)}", fix)
        elif isinstance(value, bool) or not isinstance(value, int | float) or value not in WEIGHTS:
            expected = "a number from 0 to 1000"
            yield explain(f"{KEY}.{name}", repr(value), expected, "correct it, or leave it out")
