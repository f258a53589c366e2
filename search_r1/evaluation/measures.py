"""The measures of an evaluation, as pure functions of samples without torch.

Every measure is a ratio Σ part / Σ whole over samples: for a rate the whole is 1 per sample, for a
conditional rate 1 per sample that meets the condition, for a cost 1 per correct answer. So the
bootstrap only needs the two sums of each question.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from search_r1.evaluation.samples import FAILED, Sample
from search_r1.rewards.f1 import token_f1
from search_r1.rewards.normalize import RULES, matches_exactly, normalize_accepted

Part = Callable[[Sample], float]

NEAR = 0.9
"""Minimum word F1 at which a query counts as a repetition of the question."""


@dataclass(frozen=True)
class Measure:
    """A ratio Σ part / Σ whole over samples; undefined if the wholes sum to 0."""

    name: str
    title: str
    part: Part
    whole: Part = lambda _: 1.0


def is_near(query: str, question: str) -> bool:
    """Whether a query repeats the question: equal when normalised, or word F1 >= `NEAR`."""
    if normalize_accepted(query) == normalize_accepted(question):
        return True
    return token_f1(query, [question]) >= NEAR


def num_novel(sample: Sample) -> int:
    """Count the queries that do not merely repeat the question."""
    return sum(not is_near(search.query, sample.question) for search in sample.searches)


def num_repeated(sample: Sample) -> int:
    """Count the queries that repeat an earlier query of the dialogue when normalised."""
    return len(sample.searches) - len({normalize_accepted(s.query) for s in sample.searches})


def _status(name: str) -> Part:
    return lambda sample: float(sample.status == name)


_hit: Part = attrgetter("has_answer_in_documents")


def _num_searches(sample: Sample) -> int:
    return len(sample.searches)


WRONG = {
    "no_search": "no search",
    "one_search": "one search, not found",
    "not_found": "several searches, not found",
    "not_used": "found, not used",
}
"""How the policy went wrong, and the words of a report; each wrong sample has one of them."""


def kind_of_wrong(sample: Sample) -> str:
    """Return the key of `WRONG` for a sample; '' if it is right, or failed through no fault."""
    if sample.em or sample.status == FAILED:
        return ""
    if sample.has_answer_in_documents:
        return "not_used"
    return ("no_search", "one_search", "not_found")[min(len(sample.searches), 2)]


def _wrong(kind: str) -> Part:
    return lambda sample: float(kind_of_wrong(sample) == kind)


MEASURES: tuple[Measure, ...] = (
    Measure("em", "EM", lambda s: s.em),
    Measure("f1", "F1", lambda s: s.f1),
    Measure("cover_em", "cover-EM", lambda s: s.cover_em),
    Measure("judge", "judge", lambda s: s.judge or 0.0,
            lambda s: s.judge is not None),
    Measure("answered", "answered", _status("answered")),
    Measure("searches", "searches", _num_searches),
    Measure("turns", "turns", lambda s: s.turns),
    Measure("policy_tokens", "policy tokens", lambda s: s.policy_tokens),
    Measure("observation_tokens", "observation tokens", lambda s: s.observation_tokens),
    Measure("tokens", "all tokens", lambda s: s.tokens),
    Measure("seconds", "seconds", lambda s: s.seconds or 0.0, lambda s: s.seconds is not None),
    Measure("searches_per_correct", "searches per correct", _num_searches, lambda s: s.em),
    Measure("tokens_per_correct", "policy tokens per correct", lambda s: s.policy_tokens,
            lambda s: s.em),
    Measure("answer_in_documents", "answer in documents", _hit),
    Measure("em_given_hit", "EM given hit", lambda s: s.em * _hit(s), _hit),
    Measure("em_given_miss", "EM given miss", lambda s: s.em * (not _hit(s)),
            lambda s: not _hit(s)),
    *(Measure(f"wrong_{kind}", f"wrong: {words}", _wrong(kind)) for kind, words in WRONG.items()),
    Measure("novel_queries", "novel queries", num_novel, _num_searches),
    Measure("repeated_queries", "repeated queries", num_repeated, _num_searches),
    Measure("truncated", "truncated", lambda s: float(s.truncated_turns > 0)),
    Measure("out_of_budget", "out of budget", _status("out_of_budget")),
    Measure("out_of_turns", "out of turns", _status("out_of_turns")),
    Measure("invalid", "invalid turns", lambda s: s.invalid_actions, lambda s: s.turns),
    Measure("failed", "failed", _status(FAILED)),
)  # fmt: skip
"""All measures of a report in order, apart from the optional `pass@k`."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate 1 − C(n−c, k) / C(n, k) of pass@k (Chen et al. 2021)."""
    assert 1 <= k <= num_samples, f"got k={k} of {num_samples} samples, expected 1 <= k <= n"
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def num_judged_differently(samples: Sequence[Sample]) -> int:
    """Count the questions with an answer that the rules of normalisation judge differently (EM)."""
    return len({
        (s.data_source, s.uid) for s in samples if s.answer is not None
        and len({matches_exactly(s.answer, s.ground_truth, rule) for rule in RULES.values()}) > 1
    })  # fmt: skip


def by_question(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Group samples by the uid of their question, in order of first appearance."""
    questions: dict[str, list[Sample]] = {}
    for sample in samples:
        questions.setdefault(sample.uid, []).append(sample)
    return questions


def measure_sums(
    samples: Sequence[Sample], pass_k: Sequence[int] = ()
) -> dict[str, tuple[float, float]]:
    """Compute (Σ part, Σ whole) of every measure over one question's samples."""
    sums = {
        m.name: (float(sum(map(m.part, samples))), float(sum(map(m.whole, samples))))
        for m in MEASURES
    }
    num_correct = sum(sample.em == 1.0 for sample in samples)
    passes = {f"pass@{k}": (pass_at_k(len(samples), num_correct, k), 1.0) for k in pass_k}
    return sums | passes


def titles(pass_k: Sequence[int] = ()) -> Mapping[str, str]:
    return {m.name: m.title for m in MEASURES} | {f"pass@{k}": f"pass@{k}" for k in pass_k}
