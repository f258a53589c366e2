"""``llm_judge``: 1 for an exact match, the judge's verdict for any other answer, 0 for none."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from search_r1.rewards.interface import RewardInput, RewardOutput
from search_r1.rewards.judge.endpoint import JudgeEndpoint, JudgeFailed
from search_r1.rewards.judge.options import JudgeOptions
from search_r1.rewards.judge.verdict import ask
from search_r1.rewards.normalize import matches_exactly
from search_r1.storage import FileStore


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
        asked = [self._message(dialogue) for dialogue in dialogues]
        messages = [message for message in dict.fromkeys(asked) if message is not None]
        with (
            JudgeEndpoint(self._options) as endpoint,
            ThreadPoolExecutor(self._options.max_concurrency) as pool,
        ):
            scores = pool.map(lambda message: self._verdict(message, endpoint), messages)
            verdicts = dict(zip(messages, scores, strict=True))
        return [
            _output(dialogue.answer, message, verdicts)
            for dialogue, message in zip(dialogues, asked, strict=True)
        ]

    def check(self) -> None:
        """Ask once about a known answer; raises ValueError when no verdict comes."""
        known = RewardInput(
            ["<answer>the city of Paris</answer>"], [], ["Paris"], question="Capital of France?"
        )
        message = self._message(known)
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

    def _message(self, dialogue: RewardInput) -> str | None:
        """What the judge is asked; None where none is needed."""
        answer = dialogue.answer
        if not answer or matches_exactly(answer, dialogue.ground_truth):
            return None
        return ask(
            dialogue.question,
            list(dialogue.ground_truth),
            answer[: self._options.max_answer_chars],
            verdict=self._options.verdict,
            wording=self._options.prompt,
        )

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


def _output(
    answer: str | None, message: str | None, verdicts: dict[str, float | None]
) -> RewardOutput:
    is_exact = float(bool(answer) and message is None)
    verdict = is_exact if message is None else verdicts[message]
    score = is_exact if verdict is None else verdict
    components = {
        "judge": score,
        "em": is_exact,
        "has_answer": float(answer is not None),
        "judge_asked": float(message is not None),
        "judge_failed": float(verdict is None),
    }
    return RewardOutput(score, components)
