"""Softer comparisons of the answer: token F1, and whether it covers an accepted answer."""

from collections import Counter
from collections.abc import Sequence

from search_r1.rewards.interface import RewardFn, RewardInput, RewardOutput, RewardScores
from search_r1.rewards.normalize import covers, matches_exactly, normalize_answer


def token_f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall against the best accepted answer, 0 to 1.

    Source: Rajpurkar et al. 2016. Two empty texts share no word, hence 0.
    """
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


def build_f1(scores: RewardScores, component: str = "f1") -> RewardFn:
    """Score the token F1 of the answer; no partial scores are read."""

    def score(dialogue: RewardInput) -> RewardOutput:
        components = compared(dialogue)
        return RewardOutput(components[component], components)

    return score


def build_cover_em(scores: RewardScores) -> RewardFn:
    """Score 1 when an accepted answer occurs within the given one; no partial scores are read."""
    return build_f1(scores, "cover_em")
