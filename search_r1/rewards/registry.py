"""The rewards by name (a new one is a new row), their weighted sums, a user's own functions."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from search_r1.rewards.em import score_em, score_em_cost
from search_r1.rewards.f1 import score_cover_em, score_f1
from search_r1.rewards.format import score_em_format, score_stage_1, score_stage_2
from search_r1.rewards.interface import (
    BatchRewardFn,
    OwnRewardError,
    RewardFn,
    RewardInput,
    RewardOutput,
    RewardScores,
    Rule,
)
from search_r1.rewards.judge.options import JudgeOptions


def each_alone(rule: RewardFn) -> BatchRewardFn:
    """The rule of one dialogue, applied to each."""

    return lambda dialogues: [rule(dialogue) for dialogue in dialogues]


def weighted(rules: Mapping[str, BatchRewardFn], weights: Mapping[str, float]) -> BatchRewardFn:
    """Score Σ weight · score of the named rules; every part is logged, ``NAME_score`` among them.

    Parts of equal name measure the same thing in every rule, so the last one stands.
    """

    def score_weighted(dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        found = []
        for outputs in zip(*(rule(dialogues) for rule in rules.values()), strict=True):
            score, components = 0.0, dict[str, float]()
            for name, output in zip(rules, outputs, strict=True):
                score += weights[name] * output.score
                components |= {**output.components, f"{name}_score": output.score}
            found.append(RewardOutput(score, components))
        return found

    return score_weighted


def load_function(spec: str) -> RewardFn:
    """The function that ``path/to/file.py:name`` names; see ``own``. Raises ValueError."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"got reward {spec!r}, expected path/to/file.py:function; no file {path}")
    digest = hashlib.sha256(os.fsencode(Path(path).resolve())).hexdigest()[:16]
    name_of_module = f"reward_{Path(path).stem}_{digest}"
    module_spec = importlib.util.spec_from_file_location(name_of_module, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name_of_module] = module  # dataclasses and process pools look it up there
    try:
        module_spec.loader.exec_module(module)
        return own(spec, getattr(module, name))
    except (Exception, SystemExit) as error:  # whatever a file of the user's raises
        del sys.modules[name_of_module]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        expected = "a function of one dialogue in a file that can be imported"
        raise ValueError(f"got reward {spec!r} ({text}), expected {expected}") from error


def own(spec: str, function: Callable[[RewardInput], float | RewardOutput]) -> RewardFn:
    """A user's function that scores a ``RewardInput``; `spec` is its name in messages.

    It may give a number or a ``RewardOutput``. Raises TypeError for what cannot be called so; the
    function raises OwnRewardError for whatever else it gives or raises.
    """
    inspect.signature(function).bind(None)
    if inspect.iscoroutinefunction(function):
        raise TypeError("an async function, which nobody awaits")
    code = getattr(function, "__code__", None) or type(function).__call__.__code__

    def refused(dialogue: RewardInput, got: str) -> OwnRewardError:
        shown = " ".join(got.split())[:300]
        return OwnRewardError(
            f"reward {spec} at {dialogue.uid or 'a dialogue'}: got {shown}, "
            "expected a finite number, or a RewardOutput of such; fix: correct the function"
        )

    def score_own(dialogue: RewardInput) -> RewardOutput:
        try:
            given = function(dialogue)
        except (Exception, SystemExit) as error:  # as above
            frames = traceback.extract_tb(error.__traceback__)
            line = ([f for f in frames if f.filename == code.co_filename] or frames)[-1].lineno
            raise refused(dialogue, f"{type(error).__name__} in line {line}: {error}") from error
        output = given if isinstance(given, RewardOutput) else RewardOutput(given)
        try:
            parts = {part: number(value) for part, value in output.components.items()}
            return RewardOutput(number(output.score), parts)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise refused(dialogue, repr(given)) from error

    return score_own


def number(given: object) -> float:
    """What is given, as a float. Raises ValueError for a text, an array or no finite number."""
    if isinstance(given, str | bytes) or getattr(given, "ndim", 0) != 0:
        raise ValueError(f"a {type(given).__name__} is no number")
    found = float(given)  # type: ignore[arg-type]
    if not math.isfinite(found):
        raise ValueError(f"{found} is not finite")
    return found


if TYPE_CHECKING:
    from search_r1.rewards.judge.reward import LlmJudge

LLM_JUDGE = "llm_judge"
"""The name of the reward that `build_judge` makes."""

REWARDS: Mapping[str, Rule] = MappingProxyType(
    {
        "em": score_em,
        "em_format": score_em_format,
        "f1": score_f1,
        "cover_em": score_cover_em,
        "em_cost": score_em_cost,
        "r1_searcher_stage_1": score_stage_1,
        "r1_searcher_stage_2": score_stage_2,
    }
)
"""Rules by the name used in ``reward_model.name``."""


def build_judge(options: JudgeOptions) -> LlmJudge:
    """Return the judge, which scores dialogues by the batch. Raises ValueError for a bad cache."""
    from search_r1.rewards.judge.reward import LlmJudge  # noqa: PLC0415 needs httpx

    return LlmJudge(options)


def build_batch_reward(
    name: str,
    scores: RewardScores | None = None,
    weights: Mapping[str, float] | None = None,
    judge: BatchRewardFn | None = None,
    given: Mapping[str, RewardFn] = MappingProxyType({}),
) -> BatchRewardFn:
    """Return the reward of that name, with these partial scores (the defaults when None).

    ``name`` is a row of ``REWARDS``, ``llm_judge`` (which is then ``judge``), one of ``given``, or
    a user's own ``path/to/file.py:function``. With ``weights`` the reward is the weighted sum of
    those named there instead. Raises ValueError for what is not there, and for a weight that
    inverts one of ours.
    """
    scores = scores or RewardScores()
    for part, weight in (weights or {}).items():
        if not (math.isfinite(weight) and (weight >= 0 or ":" in part)):
            raise ValueError(
                f"weights: got {weight} for {part}, expected 0 or more: below 0 a wrong answer "
                "could score more than a right one; fix: make the cost a function of your own"
            )
    if weights and not any(weights.values()):
        raise ValueError(f"weights: got {weights}, expected one above 0: every score would be 0")
    if weights:
        parts = {part: _build_one(part, scores, judge, given) for part in weights}
        return weighted(parts, weights)
    return _build_one(name, scores, judge, given)


def build_reward(
    name: str, scores: RewardScores | None = None, weights: Mapping[str, float] | None = None
) -> RewardFn:
    """Return the reward of that name for one dialogue; see ``build_batch_reward``."""
    rule = build_batch_reward(name, scores, weights)

    return lambda dialogue: rule([dialogue])[0]


def _build_one(
    name: str,
    scores: RewardScores,
    judge: BatchRewardFn | None,
    given: Mapping[str, RewardFn],
) -> BatchRewardFn:
    if name in given:
        return each_alone(own(name, given[name]))
    if ":" in name:
        return each_alone(load_function(name))
    if name == LLM_JUDGE and judge is not None:
        return judge
    if name not in REWARDS:
        near = difflib.get_close_matches(name, [*REWARDS, LLM_JUDGE], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(REWARDS)
        raise ValueError(
            f"got reward {name!r}, expected one of {known}, {LLM_JUDGE} (with its options), or "
            f"path/to/file.py:function{hint}"
        )
    rule = REWARDS[name]
    return each_alone(lambda dialogue: rule(dialogue, scores))
