"""Exact match, the reward of the Search-R1 paper, optionally minus costs for searches."""

from search_r1.rewards.interface import RewardInput, RewardOutput, RewardScores


def score_em(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score 1 for a correct answer, ``format_score`` for a wrong one, 0 for none."""
    if dialogue.answer is None:
        return RewardOutput(0.0, {"em": 0.0, "answered": 0.0})
    is_correct = dialogue.is_exact
    score = 1.0 if is_correct else scores.format_score
    return RewardOutput(score, {"em": float(is_correct), "answered": 1.0})


def score_em_cost(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score ``correct_answer`` for a correct answer, minus costs.

    Each search costs ``search_penalty`` and each turn without an action ``invalid_format``. With
    ``penalise_correct_only`` only correct answers are charged, and no score is below 0.
    """
    is_correct = dialogue.is_exact
    is_charged = is_correct or not scores.penalise_correct_only
    search_cost = is_charged * scores.search_penalty * dialogue.num_searches
    invalid_cost = is_charged * scores.invalid_format * dialogue.num_invalid
    components = {
        "em": float(is_correct),
        "answered": float(dialogue.answer is not None),
        "search_cost": search_cost,
        "invalid_cost": invalid_cost,
    }
    score = is_correct * scores.correct_answer - search_cost - invalid_cost
    return RewardOutput(max(score, 0.0) if scores.penalise_correct_only else score, components)
