"""Inputs and outputs of reward functions: plain text only, no token ids or tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from search_r1.agent.grammar import SEARCH_R1, Grammar, answer_pattern
from search_r1.rewards.normalize import Normalize, matches_exactly, normalize_answer

Origin = Literal["prompt", "policy", "observation"]


def extract_answer(policy_texts: Sequence[str], grammar: Grammar = SEARCH_R1) -> str | None:
    """Return the last complete ``<answer>…</answer>`` of the response, stripped, or None.

    Each policy text is searched separately, so that neither the prompt's example nor a document can
    supply an answer or one of its tags.

    Example: ``["<search>q</search>", "<answer> Paris </answer>"]`` gives ``"Paris"``.
    """
    for text in reversed(policy_texts):
        if answers := answer_pattern(grammar).findall(text):
            return str(answers[-1]).strip()
    return None


@dataclass(frozen=True)
class RewardInput:
    """One dialogue as the input of a reward."""

    policy_texts: Sequence[str]
    """The text of each policy segment of the response, in order."""
    segments: Sequence[tuple[Origin, str]]
    """The whole dialogue in order, as (origin, text)."""
    ground_truth: Sequence[str]
    """Accepted answers, at least one."""
    data_source: str = ""
    """The data set that the question comes from."""
    num_searches: int = 0
    """Number of searches that were carried out."""
    num_invalid: int = 0
    """Number of turns with neither a valid search nor an answer."""
    question: str = ""
    """The question if the data has it separately, else the whole prompt."""
    grammar: Grammar = SEARCH_R1
    """The tags of the dialogue."""
    uid: str = ""
    """Identifier of the question: ``file#row``."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The column ``extra_info`` of the row."""
    row_truth: Any = None
    """The ground truth as the row has it: text, list or object such as ``{"target": [...]}``."""
    normalize: Normalize = normalize_answer
    """The rule of ``reward_model.normalize``, by which answers are compared."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the agent and its tools counted in the dialogue."""

    @property
    def is_exact(self) -> bool:
        """Whether the policy's answer equals an accepted one; False without an answer."""
        answer = self.answer
        return answer is not None and matches_exactly(answer, self.ground_truth, self.normalize)

    @property
    def answer(self) -> str | None:
        """The policy's last complete answer, stripped; None without one."""
        return extract_answer(self.policy_texts, self.grammar)

    def __post_init__(self) -> None:
        """Refuse a string, whose letters would count as answers, and an empty ground truth."""
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
    """The score to train on, and its components for the metrics."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    is_right: bool | None = None
    """Whether the outcome is right, apart from what shapes the score; None: ``score`` has none."""


class OwnRewardError(ValueError):
    """A user-defined reward function raised an exception or returned no valid score."""


@dataclass(frozen=True)
class RewardScores:
    """Amounts of the partial scores and costs; the rewards' docstrings say which they use.

    All amounts are 0 or more: a cost is subtracted, so it is written without a minus sign. Raises
    ValueError for scores that would reward a wrong answer, a search or an invalid format.
    """

    format_score: float = 0.0
    """Score of a wrong answer, in ``em``."""
    structure_format_score: float = 0.0
    """Score of a valid dialogue, in ``em_format``."""
    final_format_score: float = 0.0
    """Score of a wrong answer in an invalid dialogue, in ``em_format``."""
    retrieval_score: float = 0.0
    """Extra score of a valid dialogue whose documents contain the answer, in ``em_format``."""
    correct_answer: float = 1.0
    """Score of a correct answer, in ``em_cost``."""
    search_penalty: float = 0.0
    """Cost of each search, in ``em_cost``."""
    invalid_format: float = 0.0
    """Cost of each turn without an action, in ``em_cost``."""
    penalise_correct_only: bool = False
    """Subtract the costs of ``em_cost`` from correct answers only."""
    no_search: float = 0.0
    """Cost of a dialogue without a search, in ``f1``."""
    no_answer: float = 0.0
    """Cost of a dialogue without an answer, in ``f1``."""

    def __post_init__(self) -> None:
        """Refuse scores that would invert a reward."""
        for name, amount in asdict(self).items():
            if not 0 <= amount < math.inf:
                is_cost = name in ("search_penalty", "invalid_format", "no_search", "no_answer")
                is_signed = is_cost and -math.inf < amount < 0
                meaning = "the size of a cost, which is subtracted" if is_cost else "a score"
                raise ValueError(
                    f"{name}: got {amount}, expected 0 or more: it is {meaning}; fix: "
                    f"{name}={-amount if is_signed else getattr(RewardScores, name)}"
                )
        valid, invalid = self.structure_format_score, self.final_format_score
        retrieved = valid + self.retrieval_score
        for is_wrong, name, got, expected in (
            (self.format_score > 1, "format_score", self.format_score,
             "at most 1, the score of a correct answer"),
            (retrieved > 1, "structure_format_score + retrieval_score", retrieved,
             "at most 1, the score of a correct answer"),
            (valid + invalid > 1, "structure_format_score + final_format_score", valid + invalid,
             "at most 1: a correct answer in an invalid dialogue scores 1 minus the first"),
            (invalid > valid, "final_format_score", invalid,
             f"at most structure_format_score={valid}: an invalid dialogue must not score more"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"{name}: got {got}, expected {expected}; fix: lower it")


RewardFn = Callable[[RewardInput], RewardOutput]
"""A function that scores one dialogue."""
BatchRewardFn = Callable[[Sequence[RewardInput]], list[RewardOutput]]
"""A function that scores many dialogues at once, in order."""
Rule = Callable[[RewardInput, RewardScores], RewardOutput]
"""A function that scores one dialogue with the given partial scores and costs."""
