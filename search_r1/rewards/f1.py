"""Softer comparisons of the answer: token F1, and whether it covers an accepted answer."""

from collections import Counter
from collections.abc import Sequence

from search_r1.rewards.interface import RewardInput, RewardOutput, RewardScores
from search_r1.rewards.normalize import covers, matches_exactly, normalize_answer


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, the best (Rajpurkar et al. 2016); 0 to 1."""
    words, best = Counter(normalize_answer(answer).split()), 0.0
    for gold in accepted:
        wanted = Counter(normalize_answer(gold).split())
        if num_common := (words & wanted).total():
            best = max(best, 2.0 * num_common / (words.total() + wanted.total()))
    return best


def compared(dialogue: RewardInput) -> dict[str, float]:
    """The components of a comparison with the accepted answers."""
    answer = dialogue.answer
    given = answer or ""
    return {
        "em": float(matches_exactly(given, dialogue.ground_truth)),
        "f1": token_f1(given, dialogue.ground_truth),
        "cover_em": float(covers(given, dialogue.ground_truth)),
        "has_answer": float(answer is not None),
    }


def score_f1(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the token F1 of the answer; no partial scores are read."""
    components = compared(dialogue)
    return RewardOutput(components["f1"], components)


def score_cover_em(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score 1 when an accepted answer occurs within the given one; no partial scores are read."""
    components = compared(dialogue)
    return RewardOutput(components["cover_em"], components)
