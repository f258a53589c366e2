"""The two stages of R1-Searcher (Song et al. 2025): learn to search, then learn to answer."""

from search_r1.rewards.f1 import compared
from search_r1.rewards.format import is_valid_dialogue
from search_r1.rewards.interface import RewardFn, RewardInput, RewardOutput, RewardScores

RETRIEVAL_REWARD = 0.5
FORMAT_REWARD = 0.5
FORMAT_PENALTY = 2.0


def build_stage_1(scores: RewardScores) -> RewardFn:
    """Score 0.5 for at least one search and 0.5 for a valid dialogue; the answer has no say."""

    def score_stage_1(dialogue: RewardInput) -> RewardOutput:
        components = _components(dialogue)
        searched = float(dialogue.num_searches > 0)
        score = RETRIEVAL_REWARD * searched + FORMAT_REWARD * components["format_valid"]
        return RewardOutput(score, {**components, "searched": searched})

    return score_stage_1


def build_stage_2(scores: RewardScores) -> RewardFn:
    """Score the answer's F1, less 2 for an invalid dialogue."""

    def score_stage_2(dialogue: RewardInput) -> RewardOutput:
        components = _components(dialogue)
        score = components["f1"] - FORMAT_PENALTY * (1.0 - components["format_valid"])
        return RewardOutput(score, components)

    return score_stage_2


def _components(dialogue: RewardInput) -> dict[str, float]:
    is_valid = is_valid_dialogue(dialogue.segments, dialogue.grammar)
    return {**compared(dialogue), "format_valid": float(is_valid)}
