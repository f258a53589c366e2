"""The rewards by name; a new reward is a new row."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from search_r1.reward.combine import load_function, weighted
from search_r1.reward.cost import build_em_cost
from search_r1.reward.em import build_em
from search_r1.reward.f1 import build_cover_em, build_f1
from search_r1.reward.format import build_em_format
from search_r1.reward.interface import RewardBuilder, RewardFn, RewardScores
from search_r1.reward.r1_searcher import build_stage_1, build_stage_2

REWARDS: Mapping[str, RewardBuilder] = MappingProxyType(
    {
        "em": build_em,
        "em_format": build_em_format,
        "f1": build_f1,
        "cover_em": build_cover_em,
        "em_cost": build_em_cost,
        "r1_searcher_stage_1": build_stage_1,
        "r1_searcher_stage_2": build_stage_2,
    }
)
"""Builders by the name used in ``reward_model.name``."""


def build_reward(
    name: str, scores: RewardScores | None = None, weights: Mapping[str, float] | None = None
) -> RewardFn:
    """Return the reward of that name, with these partial scores (the defaults when None).

    ``name`` is a row of ``REWARDS`` or a user's own ``path/to/file.py:function``. With ``weights``
    the reward is the weighted sum of those named there instead. Raises ValueError for what is not
    there.
    """
    scores = scores or RewardScores()
    if weights:
        return weighted({part: _build_one(part, scores) for part in weights}, weights)
    return _build_one(name, scores)


def _build_one(name: str, scores: RewardScores) -> RewardFn:
    if ":" in name:
        return load_function(name)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(REWARDS)
        raise ValueError(
            f"got reward {name!r}, expected one of {known}, or path/to/file.py:function{hint}"
        )
    return REWARDS[name](scores)
