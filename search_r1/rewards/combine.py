"""Rewards made of rewards: a weighted sum, and a user's own function."""

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from search_r1.rewards.interface import BatchRewardFn, RewardFn, RewardInput, RewardOutput


def each_alone(rule: RewardFn) -> BatchRewardFn:
    """The rule of one dialogue, applied to each."""

    def score_each(dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        return [rule(dialogue) for dialogue in dialogues]

    return score_each


def weighted(rules: Mapping[str, BatchRewardFn], weights: Mapping[str, float]) -> BatchRewardFn:
    """Score Σ weight · score of the named rules; every part is logged, ``NAME_score`` among them.

    Parts of equal name measure the same thing in every rule, so the last one stands.
    """

    def score_weighted(dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        outputs = {name: rule(dialogues) for name, rule in rules.items()}
        by_dialogue = [{name: outputs[name][i] for name in rules} for i in range(len(dialogues))]
        return [_sum(parts, weights) for parts in by_dialogue]

    return score_weighted


def _sum(parts: Mapping[str, RewardOutput], weights: Mapping[str, float]) -> RewardOutput:
    components: dict[str, float] = {}
    for name, output in parts.items():
        components |= {**output.components, f"{name}_score": output.score}
    return RewardOutput(sum(weights[n] * o.score for n, o in parts.items()), components)


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
    try:
        module_spec.loader.exec_module(module)
        function = getattr(module, name)
        inspect.signature(function).bind(None)
    except (Exception, SystemExit) as error:  # whatever a file of the user's raises
        text = " ".join(f"{type(error).__name__}: {error}".split())
        expected = "a function of one dialogue in a file that can be imported"
        raise ValueError(f"got reward {spec!r} ({text}), expected {expected}") from error

    def score_own(dialogue: RewardInput) -> RewardOutput:
        output = function(dialogue)
        return output if isinstance(output, RewardOutput) else RewardOutput(float(output))

    return score_own
