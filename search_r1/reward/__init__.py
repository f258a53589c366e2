"""Rules that score a dialogue, one small file a family; none imports torch or the trainer."""

from search_r1.reward.interface import RewardFn, RewardInput, RewardOutput, RewardScores
from search_r1.reward.registry import REWARDS, build_reward

__all__ = ["REWARDS", "RewardFn", "RewardInput", "RewardOutput", "RewardScores", "build_reward"]
