"""Partial matches of the answer: token F1, and whether it contains an accepted answer."""

from collections import Counter
from collections.abc import Sequence

from search_r1.rewards.interface import RewardInput, RewardOutput, RewardScores
from search_r1.rewards.normalize import (
    Normalize,
    covers,
    normalize_answer,
    normalized_pairs,
    words_of,
)


def token_f1(
    answer: str, accepted: Sequence[str], normalize: Normalize = normalize_answer
) -> float:
    """Return the best word F1 over the accepted answers (Rajpurkar et al. 2016), 0 to 1.

    Characters of scripts without spaces between words count as words, as in CMRC 2018 and DRCD, if
    the accepted answer has any.
    """
    best = 0.0
    for text, gold in normalized_pairs(answer, accepted, normalize):
        gold_words = words_of(gold)
        is_spaced = gold_words == gold.split()
        words, expected = (
            Counter(text.split() if is_spaced else words_of(text)),
            Counter(gold_words),
        )
        if num_common := (words & expected).total():
            best = max(best, 2.0 * num_common / (words.total() + expected.total()))
    return best


def compare_answer(dialogue: RewardInput) -> dict[str, float]:
    """Return the components em, f1, cover_em and answered of the dialogue's answer."""
    answer = dialogue.answer
    text = answer or ""
    return {
        "em": float(dialogue.is_exact),
        "f1": token_f1(text, dialogue.ground_truth, dialogue.normalize),
        "cover_em": float(covers(text, dialogue.ground_truth, dialogue.normalize)),
        "answered": float(answer is not None),
    }


def score_f1(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the token F1, minus ``no_search`` without a search, ``no_answer`` without an answer.

    F1 alone can teach a policy to avoid answers (Xu et al. 2026, arXiv 2602.19526).
    """
    components = compare_answer(dialogue)
    if not scores.no_search and not scores.no_answer:
        return RewardOutput(components["f1"], components)
    cost = scores.no_search * (not dialogue.num_searches)
    cost += scores.no_answer * (dialogue.answer is None)
    return RewardOutput(components["f1"] - cost, {**components, "action_cost": cost})


def score_cover_em(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score 1 if the answer contains an accepted one, else 0 (see `covers`); no ``scores``."""
    components = compare_answer(dialogue)
    return RewardOutput(components["cover_em"], components)
