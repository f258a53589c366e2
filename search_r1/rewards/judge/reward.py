"""``llm_judge``: 1 for an exact match, the judge's verdict for any other answer, 0 for none."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from search_r1.rewards.interface import RewardInput, RewardOutput
from search_r1.rewards.judge.endpoint import JudgeEndpoint, JudgeFailed
from search_r1.rewards.judge.options import JudgeOptions
from search_r1.rewards.judge.verdict import ask
from search_r1.rewards.normalize import matches_exactly
from search_r1.storage import FileStore


@dataclass(frozen=True)
class _Case:
    """One dialogue before the verdict; ``message`` is None where none is needed."""

    is_exact: bool
    has_answer: bool
    message: str | None


class LlmJudge:
    """Scores a batch of dialogues; equal messages are asked once.

    The score falls back to exact match, which is then 0, where no verdict is to be had, and
    ``judge_failed`` counts it. Components: ``judge`` (the score), ``em``, ``has_answer``,
    ``judge_asked`` (a verdict was needed), ``judge_failed``.
    """

    def __init__(self, options: JudgeOptions) -> None:
        """Open the cache; raises ValueError if it cannot be one."""
        self._options = options
        self._cache = _open_cache(options.cache_path) if options.cache_path else None

    def __call__(self, dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        cases = [self._case(dialogue) for dialogue in dialogues]
        messages = list(dict.fromkeys(c.message for c in cases if c.message is not None))
        with (
            JudgeEndpoint(self._options) as endpoint,
            ThreadPoolExecutor(self._options.max_concurrency) as pool,
        ):
            scores = pool.map(lambda message: self._verdict(message, endpoint), messages)
            verdicts = dict(zip(messages, scores, strict=True))
        return [_output(case, verdicts) for case in cases]

    def check(self) -> None:
        """Ask once about a known answer; raises ValueError when no verdict comes."""
        known = RewardInput(
            ["<answer>the city of Paris</answer>"], [], ["Paris"], question="Capital of France?"
        )
        message = self._case(known).message
        assert message is not None
        try:
            with JudgeEndpoint(self._options) as endpoint:
                endpoint.judge(message)
        except JudgeFailed as error:
            raise ValueError(
                f"got no verdict from {self._options.url} ({error}), expected "
                f"{self._options.model} to reply as reward_model.judge.verdict="
                f"{self._options.verdict} asks: start it, or correct reward_model.judge"
            ) from error

    def _case(self, dialogue: RewardInput) -> _Case:
        answer = dialogue.answer
        if not answer or matches_exactly(answer, dialogue.ground_truth):
            return _Case(bool(answer), answer is not None, None)
        message = ask(
            dialogue.question,
            list(dialogue.ground_truth),
            answer[: self._options.max_answer_chars],
            verdict=self._options.verdict,
            wording=self._options.prompt,
        )
        return _Case(False, True, message)

    def _verdict(self, message: str, endpoint: JudgeEndpoint) -> float | None:
        """The judge's score, None when it gives none; only verdicts are kept."""
        key = (hashlib.sha256(f"{self._options.model}\0{message}".encode()).hexdigest(),)
        if self._cache and (kept := self._cache.get([key])):
            return float(kept[key])
        try:
            score = endpoint.judge(message)
        except JudgeFailed:
            return None
        if self._cache:
            self._cache.put({key: score})
        return score


def _open_cache(path: str) -> FileStore:
    """A file of verdicts, which several runs may share; raises ValueError."""
    option = "reward_model.judge.cache_path"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"got {option}={path} ({error}), expected a path to write to") from error
    return FileStore(path, option)


def _output(case: _Case, verdicts: dict[str, float | None]) -> RewardOutput:
    verdict = float(case.is_exact) if case.message is None else verdicts[case.message]
    score = float(case.is_exact) if verdict is None else verdict
    components = {
        "judge": score,
        "em": float(case.is_exact),
        "has_answer": float(case.has_answer),
        "judge_asked": float(case.message is not None),
        "judge_failed": float(verdict is None),
    }
    return RewardOutput(score, components)
