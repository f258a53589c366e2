"""Registry of rewards by name, and their weighted sums."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from search_r1.rewards.em import score_em, score_em_cost
from search_r1.rewards.f1 import score_cover_em, score_f1
from search_r1.rewards.format import score_em_format, score_stage_1, score_stage_2
from search_r1.rewards.interface import (
    BatchRewardFn,
    RewardFn,
    RewardInput,
    RewardOutput,
    RewardScores,
    Rule,
)
from search_r1.rewards.judge.judge_options import JudgeOptions

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "em": "em",
        "em_format": "em",
        "em_cost": "em",
        "cover_em": "cover_em",
        "llm_judge": "judge",
        "f1": "f1",
        "r1_searcher_stage_2": "f1",
    }
)
"""The component that says of an answer whether it is right: above 0. The first stage has none."""


def per_dialogue(rule: RewardFn) -> BatchRewardFn:
    """Return a batch reward that applies `rule` to each dialogue."""
    return lambda dialogues: [rule(dialogue) for dialogue in dialogues]


def with_outcome(name: str, rule: BatchRewardFn) -> BatchRewardFn:
    """Return the built-in reward of that name, whose outputs say whether the outcome is right."""
    component = OUTCOMES.get(name)
    if component is None:
        return rule
    return lambda dialogues: [
        replace(output, is_right=output.components[component] > 0) for output in rule(dialogues)
    ]


def is_any_right(outputs: Mapping[str, RewardOutput]) -> bool | None:
    """Whether the outcome of a weighted sum is right: that of any part.

    F1 shapes the score where another part has an outcome. None if no part has one.
    """
    known = {name: output for name, output in outputs.items() if output.is_right is not None}
    exact = [name for name in known if OUTCOMES.get(name) != "f1"]
    return any(known[name].is_right for name in exact or known) if known else None


def weighted_sum(rules: Mapping[str, BatchRewardFn], weights: Mapping[str, float]) -> BatchRewardFn:
    """Return the reward Σ weight · score of the named rules.

    Its components are those of all rules, and each rule's score as ``NAME_score``. Components with
    the same name have the same value in every rule, so the last one is kept.
    """

    def score_batch(dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        sums = []
        for outputs in zip(*(rule(dialogues) for rule in rules.values()), strict=True):
            score, components = 0.0, dict[str, float]()
            parts = dict(zip(rules, outputs, strict=True))
            for name, output in parts.items():
                score += weights[name] * output.score
                components |= {**output.components, f"{name}_score": output.score}
            counted = {name: output for name, output in parts.items() if weights[name]}
            sums.append(RewardOutput(score, components, is_any_right(counted)))
        return sums

    return score_batch


if TYPE_CHECKING:
    from search_r1.rewards.judge.reward import LlmJudge

LLM_JUDGE = "llm_judge"
"""Name of the reward that `build_judge` builds."""

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
"""Built-in rules by their name in ``reward_model.name``."""


def build_judge(options: JudgeOptions) -> LlmJudge:
    """Build the LLM judge, a batch reward. Raises ValueError for an invalid cache."""
    try:
        from search_r1.rewards.judge.reward import LlmJudge  # noqa: PLC0415 needs openai
    except ModuleNotFoundError as error:
        raise ValueError(f"{LLM_JUDGE} needs {error.name}; fix: pip install openai") from error
    return LlmJudge(options)


def build_batch_reward(
    name: str,
    scores: RewardScores | None = None,
    weights: Mapping[str, float] | None = None,
    judge: BatchRewardFn | None = None,
) -> BatchRewardFn:
    """Build the reward of that name with these partial scores (None: the defaults).

    ``name`` is a key of ``REWARDS``, ``llm_judge`` (which returns ``judge``), or a user's
    ``path/to/file.py:function``. With ``weights``, build the weighted sum of the rewards named
    there instead. Raises ValueError for unknown names, for weights that are not finite or all 0,
    and for a negative weight of a built-in reward, which would invert it; ConfigError for a file.
    """
    scores = scores or RewardScores()
    if not weights:
        return _build_one(name, scores, judge)
    for part, weight in weights.items():
        if not (math.isfinite(weight) and (weight >= 0 or ":" in part)):
            raise ValueError(
                f"weights: got {weight} for {part}, expected 0 or more: below 0 a wrong answer "
                "could score more than a right one; fix: write a custom function for the cost"
            )
    if not any(weights.values()):
        raise ValueError(f"weights: got {weights}, expected one above 0: every score would be 0")
    parts = {part: _build_one(part, scores, judge) for part in weights}
    return weighted_sum(parts, weights)


def build_reward(
    name: str, scores: RewardScores | None = None, weights: Mapping[str, float] | None = None
) -> RewardFn:
    """Build the reward of that name for single dialogues; see ``build_batch_reward``."""
    rule = build_batch_reward(name, scores, weights)
    return lambda dialogue: rule([dialogue])[0]


def _build_one(name: str, scores: RewardScores, judge: BatchRewardFn | None) -> BatchRewardFn:
    if ":" in name:
        from search_r1.rewards.own import load_function  # noqa: PLC0415 by option

        return load_function(name)
    if name == LLM_JUDGE and judge is not None:
        return with_outcome(name, judge)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, [*REWARDS, LLM_JUDGE], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"got reward {name!r}, expected one of {', '.join(REWARDS)}, {LLM_JUDGE} (with its "
            f"options), or path/to/file.py:function{hint}"
        )
    rule = REWARDS[name]
    return with_outcome(name, per_dialogue(lambda dialogue: rule(dialogue, scores)))
