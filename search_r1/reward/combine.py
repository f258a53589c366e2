"""Rewards made of rewards: a weighted sum, and a user's own function."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from search_r1.reward.interface import RewardFn, RewardInput, RewardOutput


def weighted(rules: Mapping[str, RewardFn], weights: Mapping[str, float]) -> RewardFn:
    """Score Σ weight · score of the named rules; every part is logged, ``NAME_score`` among them.

    Parts of equal name measure the same thing in every rule, so the last one stands.
    """

    def score_weighted(dialogue: RewardInput) -> RewardOutput:
        components: dict[str, float] = {}
        total = 0.0
        for name, rule in rules.items():
            output = rule(dialogue)
            total += weights[name] * output.score
            components |= {**output.components, f"{name}_score": output.score}
        return RewardOutput(total, components)

    return score_weighted


def load_function(spec: str) -> RewardFn:
    """The function that ``path/to/file.py:name`` names; it scores a ``RewardInput``.

    It may give a number or a ``RewardOutput``. Raises ValueError that says what is missing.
    """
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"got reward {spec!r}, expected path/to/file.py:function; no file {path}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"got reward {spec!r}, but {path} has no function {name!r}")

    def score_own(dialogue: RewardInput) -> RewardOutput:
        output = function(dialogue)
        return output if isinstance(output, RewardOutput) else RewardOutput(float(output))

    return score_own
