"""Exact match: the reward of the Search-R1 paper."""

from search_r1.rewards.interface import RewardFn, RewardInput, RewardOutput, RewardScores
from search_r1.rewards.normalize import matches_exactly


def build_em(scores: RewardScores) -> RewardFn:
    """Score 1 for a correct answer, ``format_score`` for a wrong one, 0 for none."""

    def score_em(dialogue: RewardInput) -> RewardOutput:
        answer = dialogue.answer
        if answer is None:
            return RewardOutput(0.0, {"em": 0.0, "has_answer": 0.0})
        is_correct = matches_exactly(answer, dialogue.ground_truth)
        score = 1.0 if is_correct else scores.format_score
        return RewardOutput(score, {"em": float(is_correct), "has_answer": 1.0})

    return score_em
