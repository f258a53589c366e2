"""What every reward is given and gives back. Plain text only: no token ids, no tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from search_r1.agent.grammar import SEARCH_R1, Grammar, answer_pattern

Origin = Literal["prompt", "policy", "observation"]


def extract_answer(policy_texts: Sequence[str], grammar: Grammar = SEARCH_R1) -> str | None:
    """Return the last complete ``<answer>…</answer>`` of the response, stripped; None without one.

    Each policy text is read by itself: neither the prompt's example nor a document can supply an
    answer, or one half of its tags.

    Example: ``["<search>q</search>", "<answer> Paris </answer>"]`` gives ``"Paris"``.
    """
    for text in reversed(policy_texts):
        found = answer_pattern(grammar).findall(text)
        if found:
            return str(found[-1]).strip()
    return None


@dataclass(frozen=True)
class RewardInput:
    """One dialogue as a reward sees it."""

    policy_texts: Sequence[str]
    """The text of each policy segment of the response, in order."""
    segments: Sequence[tuple[Origin, str]]
    """The whole dialogue in order: (origin, text)."""
    ground_truth: Sequence[str]
    """Accepted answers, at least one."""
    data_source: str = ""
    """The data set that the question comes from."""
    num_searches: int = 0
    """Searches that were carried out."""
    num_invalid: int = 0
    """Turns that asked for neither a search nor an answer."""
    question: str = ""
    """What was asked, where the data say so; else the whole prompt."""
    grammar: Grammar = SEARCH_R1
    """The tags of the dialogue."""
    uid: str = ""
    """The name of its question: ``file#row``."""

    @property
    def answer(self) -> str | None:
        """The last complete answer that the policy gave, stripped; None without one."""
        return extract_answer(self.policy_texts, self.grammar)

    def __post_init__(self) -> None:
        """Refuse what would silently score letters, or nothing, as answers."""
        if isinstance(self.ground_truth, str):
            raise TypeError(
                f"got ground_truth {self.ground_truth!r}, expected a list of accepted answers: "
                f"write [{self.ground_truth!r}]"
            )
        if not self.ground_truth:
            raise ValueError(
                f"got no ground truth for a row of {self.data_source!r}, expected at least one "
                "accepted answer: fix reward_model.ground_truth.target of that row"
            )


@dataclass(frozen=True)
class RewardOutput:
    """The score that is trained on, and its parts for the metrics."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)


class OwnRewardError(ValueError):
    """A user's own function raised, or gave no score."""


@dataclass(frozen=True)
class RewardScores:
    """What is paid for what; which reward reads which, its docstring says.

    All are sizes, costs too: what a cost takes off is never written with a minus sign. Raises
    ValueError for scores that would pay for a wrong answer, a search or a broken form.
    """

    format_score: float = 0.0
    """A wrong answer, in ``em``."""
    structure_format_score: float = 0.0
    """A valid dialogue, in ``em_format``."""
    final_format_score: float = 0.0
    """A wrong answer in an invalid dialogue, in ``em_format``."""
    retrieval_score: float = 0.0
    """A valid dialogue whose documents hold the answer, in ``em_format``: comes on top."""
    correct_answer: float = 1.0
    """A correct answer, in ``em_cost``."""
    search_penalty: float = 0.0
    """What a search costs, in ``em_cost``."""
    invalid_format: float = 0.0
    """What a turn without an action costs, in ``em_cost``."""
    penalise_correct_only: bool = False
    """Take the costs of ``em_cost`` off correct answers alone."""

    def __post_init__(self) -> None:
        """Refuse scores that invert a reward."""
        for name, amount in asdict(self).items():
            if not 0 <= amount < math.inf:
                is_cost = name in ("search_penalty", "invalid_format")
                is_signed = is_cost and -math.inf < amount < 0
                meaning = "the size of a cost, which is taken off" if is_cost else "what is paid"
                raise ValueError(
                    f"{name}: got {amount}, expected 0 or more: it is {meaning}; fix: "
                    f"{name}={-amount if is_signed else getattr(RewardScores, name)}"
                )
        valid, invalid = self.structure_format_score, self.final_format_score
        found = self.retrieval_score
        for is_wrong, name, got, expected in (
            (self.format_score > 1, "format_score", self.format_score,
             "at most 1, the score of a correct answer"),
            (valid + found > 1, "structure_format_score + retrieval_score", valid + found,
             "at most 1, the score of a correct answer"),
            (valid + invalid > 1, "structure_format_score + final_format_score", valid + invalid,
             "at most 1: a correct answer in an invalid dialogue scores 1 less the first"),
            (invalid > valid, "final_format_score", invalid,
             f"at most structure_format_score={valid}: a broken form must not score more"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"{name}: got {got}, expected {expected}; fix: lower it")


RewardFn = Callable[[RewardInput], RewardOutput]
"""Scores one dialogue."""
BatchRewardFn = Callable[[Sequence[RewardInput]], list[RewardOutput]]
"""Scores many dialogues at once, in order."""
Rule = Callable[[RewardInput, RewardScores], RewardOutput]
"""Scores one dialogue by what is paid for what."""
