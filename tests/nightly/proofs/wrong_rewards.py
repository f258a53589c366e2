"""Rewards that make a policy collapse, for the proof that the guard notices."""

from search_r1.rewards import RewardInput, RewardOutput


def wrong_sign(dialogue: RewardInput) -> RewardOutput:
    """Score -1 for a right answer and 0 for others; the components stay true."""
    is_right = dialogue.is_exact
    return RewardOutput(-float(is_right), {"em": float(is_right)}, is_right)


def longest(dialogue: RewardInput) -> RewardOutput:
    """Score what the policy writes by its length alone; the components stay true."""
    is_right = dialogue.is_exact
    length = sum(map(len, dialogue.policy_texts)) / 100
    return RewardOutput(length, {"em": float(is_right)}, is_right)
