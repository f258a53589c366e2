"""The rewards by name; a new reward is a new row."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from search_r1.reward.em import build_em
from search_r1.reward.f1 import build_cover_em, build_f1
from search_r1.reward.format import build_em_format
from search_r1.reward.interface import RewardBuilder, RewardFn, RewardScores

REWARDS: Mapping[str, RewardBuilder] = MappingProxyType(
    {
        "em": build_em,
        "em_format": build_em_format,
        "f1": build_f1,
        "cover_em": build_cover_em,
    }
)
"""Builders by the name used in ``reward_model.name``."""


def build_reward(name: str, scores: RewardScores | None = None) -> RewardFn:
    """Return the reward of that name, with these partial scores (all 0 when None).

    Raises ValueError for a name that is not in ``REWARDS``.
    """
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"got reward {name!r}, expected one of {', '.join(REWARDS)}{hint}")
    return REWARDS[name](scores or RewardScores())
