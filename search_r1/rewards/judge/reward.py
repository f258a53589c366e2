"""The reward ``llm_judge``: 1 for an exact match, else the judge's verdict; 0 without an answer."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from search_r1.rewards.interface import RewardInput, RewardOutput
from search_r1.rewards.judge.endpoint import JudgeEndpoint, JudgeFailed
from search_r1.rewards.judge.judge_options import JudgeOptions
from search_r1.rewards.judge.message import build_message
from search_r1.store import FileStore

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARS = 500
"""Of a longer answer the judge sees the beginning."""


class LlmJudge:
    """Scores a batch of dialogues; equal messages are sent only once.

    Without a verdict the score is 0. Components: ``judge`` (the score), ``em``, ``answered``,
    ``judge_asked`` (a verdict was needed), ``judge_failed`` (it was needed but not given).
    """

    def __init__(self, options: JudgeOptions) -> None:
        """Open the cache. Raises ValueError if the file is not a cache or cannot be written."""
        self._options = options
        self._endpoint = JudgeEndpoint(options)
        self._cache = None
        if options.cache_path:
            with contextlib.suppress(OSError):  # FileStore raises the error
                Path(options.cache_path).parent.mkdir(parents=True, exist_ok=True)
            self._cache = FileStore(options.cache_path, "reward_model.judge.cache_path")

    def __call__(self, dialogues: Sequence[RewardInput]) -> list[RewardOutput]:
        messages = [self._message(dialogue) for dialogue in dialogues]
        unique = [message for message in dict.fromkeys(messages) if message is not None]
        failures = list[JudgeFailed]()
        with ThreadPoolExecutor(self._options.max_concurrency) as pool:
            scores = pool.map(lambda message: self._verdict(message, failures), unique)
            verdicts = dict(zip(unique, scores, strict=True))
        return [
            _output(dialogue.answer, message, verdicts)
            for dialogue, message in zip(dialogues, messages, strict=True)
        ]

    def check(self) -> None:
        """Send one test question. Raises ValueError if the judge gives no verdict."""
        example = RewardInput(
            ["<answer>the city of Paris</answer>"], [], ["Paris"], question="Capital of France?"
        )
        message = self._message(example)
        assert message is not None, "the example is no exact match"
        try:
            self._endpoint.judge(message)
        except JudgeFailed as error:
            raise ValueError(
                f"got no verdict from {self._options.url} ({error}), expected "
                f"{self._options.model} to reply as reward_model.judge.verdict="
                f"{self._options.verdict} asks: start it, or correct reward_model.judge"
            ) from error

    def _message(self, dialogue: RewardInput) -> str | None:
        """Build the message to the judge; None if no verdict is needed."""
        answer = dialogue.answer
        if not answer or dialogue.is_exact:
            return None
        return build_message(
            dialogue.question,
            list(dialogue.ground_truth),
            answer[:MAX_ANSWER_CHARS],
            verdict=self._options.verdict,
            wording=self._options.prompt,
        )

    def _verdict(self, message: str, failures: list[JudgeFailed]) -> float | None:
        """Return the judge's score, from the cache if it is there; None if the judge fails.

        After `max_concurrency` failures of a batch in a row the judge is considered down, and the
        rest of the batch fails without a request.
        """
        body = json.dumps(self._options.body, sort_keys=True) if self._options.body else ""
        text = f"{self._options.model}{body}\0{message}"
        key = (hashlib.sha256(text.encode()).hexdigest(),)
        if self._cache and (cached := self._cache.get([key])):
            return float(cached[key])
        if len(failures) >= self._options.max_concurrency:
            return None
        try:
            score = self._endpoint.judge(message)
        except JudgeFailed as error:
            logger.log(logging.DEBUG if failures else logging.WARNING, "judge: %s", error)
            failures.append(error)
            return None
        failures.clear()
        if self._cache:
            self._cache.put({key: score})
        return score


def _output(
    answer: str | None, message: str | None, verdicts: dict[str, float | None]
) -> RewardOutput:
    is_exact = float(bool(answer) and message is None)
    verdict = is_exact if message is None else verdicts[message]
    score = is_exact if verdict is None else verdict
    components = {
        "judge": score,
        "em": is_exact,
        "answered": float(answer is not None),
        "judge_asked": float(message is not None),
        "judge_failed": float(verdict is None),
    }
    return RewardOutput(score, components)
