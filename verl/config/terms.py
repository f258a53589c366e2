"""Weights of `actor.terms`: further terms of the policy's update, beside any estimator."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from verl.bounds import Bounds
from verl.errors import did_you_mean, explain

KEY = "actor_rollout_ref.actor.terms"
TEACHER = "actor_rollout_ref.actor.teacher"
TERMS = ("llds", "sibling", "teacher")
WEIGHTS = Bounds(ge=0, le=1000)
ASKED = ("wrong", "all")


@dataclass(frozen=True)
class Teacher:
    """The model from which the term `teacher` distils, on a server."""

    url: str
    """As http://host:8000, of a server of vLLM."""
    served_model: str
    """The model's name there."""
    api_key_env: str | None = None
    """Environment variable with the key, if the server wants one."""
    trajectories: str = "wrong"
    """Which it is asked about: wrong ones, or all."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the settings of `actor.teacher`, which were checked."""
        return cls(**given)


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each term that is unknown, or whose weight is not a number in bounds."""
    for name, value in given.items():
        if name not in TERMS:
            fix = did_you_mean(name, TERMS, "leave it out")
            yield explain(f"{KEY}.{name}", repr(value), f"one of {', '.join(TERMS)}", fix)
        elif isinstance(value, bool) or not isinstance(value, int | float) or value not in WEIGHTS:
            expected = "a number from 0 to 1000"
            yield explain(f"{KEY}.{name}", repr(value), expected, "correct it, or leave it out")


def teacher_problems(terms: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each setting of a teacher that is unknown, missing or has no effect."""
    names = [field.name for field in fields(Teacher)]
    for name, value in given.items():
        if name not in names:
            fix = did_you_mean(name, names, "leave it out")
            yield explain(f"{TEACHER}.{name}", repr(value), f"one of {', '.join(names)}", fix)
        elif not (isinstance(value, str) and value):
            yield explain(f"{TEACHER}.{name}", repr(value), "a text", "correct it")
    if given.get("trajectories", "wrong") not in ASKED:
        got = repr(given["trajectories"])
        yield explain(f"{TEACHER}.trajectories", got, "wrong or all", "name one of them")
    has_weight = bool(terms.get("teacher"))
    fix = f"{KEY}.teacher=0.1 with {TEACHER}={{url: http://host:8000, served_model: NAME}}"
    if has_weight and not {"url", "served_model"} <= given.keys():
        yield explain(TEACHER, str(dict(given)), "url and served_model", fix)
    if given and not has_weight:
        yield explain(f"{KEY}.teacher", "no weight", "one for the teacher", fix)
