"""Reward functions for dialogues: plain Python over text, without torch or the trainer."""

from search_r1.rewards.interface import (
    BatchRewardFn,
    RewardFn,
    RewardInput,
    RewardOutput,
    RewardScores,
)
from search_r1.rewards.judge.judge_options import JudgeOptions
from search_r1.rewards.registry import (
    LLM_JUDGE,
    REWARDS,
    build_batch_reward,
    build_judge,
    build_reward,
)

__all__ = [
    "LLM_JUDGE",
    "REWARDS",
    "BatchRewardFn",
    "JudgeOptions",
    "RewardFn",
    "RewardInput",
    "RewardOutput",
    "RewardScores",
    "build_batch_reward",
    "build_judge",
    "build_reward",
]
