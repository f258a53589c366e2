"""Requests to the judge: retries with growing pauses, and a circuit that opens when it is down."""

import logging
import threading
import time
from typing import Self

import httpx

from search_r1.rewards.judge.options import JudgeOptions
from search_r1.rewards.judge.verdict import read

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses under which another try may succeed."""
MAX_PAUSE_S = 30.0


class JudgeFailed(Exception):
    """No verdict was to be had."""


class _Transient(Exception):
    """One try failed in a way that another may not; ``pause`` seconds were asked for."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class JudgeEndpoint:
    """An OpenAI-compatible chat endpoint for one batch; safe to use from several threads."""

    def __init__(self, options: JudgeOptions) -> None:
        """Open no connection yet."""
        self.options = options
        self._url = f"{options.url.rstrip('/')}/chat/completions"
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
            timeout=options.timeout,
            limits=httpx.Limits(max_connections=options.max_concurrency),
        )
        self._failures = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Serve a batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._client.close()

    def judge(self, message: str) -> float:
        """The verdict on one message, 0 to 1. Raises JudgeFailed when every try has failed.

        Once as many messages in a row as may be under way at a time have failed for good, the
        judge is taken to be down, and the rest of the batch fails at once.
        """
        if self._failures >= self.options.max_concurrency:
            raise JudgeFailed("the judge is down")
        try:
            score = self._with_retries(message)
        except JudgeFailed as error:
            with self._lock:
                self._failures += 1
                is_first = self._failures == 1
            logger.log(logging.WARNING if is_first else logging.DEBUG, "judge: %s", error)
            raise
        with self._lock:
            self._failures = 0
        return score

    def _with_retries(self, message: str) -> float:
        pause = self.options.first_pause
        for num_left in range(self.options.max_retries, -1, -1):
            try:
                return self._try(message)
            except _Transient as error:
                if not num_left:
                    raise JudgeFailed(str(error)) from error
                time.sleep(min(MAX_PAUSE_S, max(pause, error.pause)))
                pause *= 2
        raise AssertionError("the last try returns or raises")

    def _try(self, message: str) -> float:
        """One request. Raises _Transient, or JudgeFailed where trying again is of no use."""
        body = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": 0,
            "max_tokens": self.options.max_tokens,
        }
        try:
            answer = self._client.post(self._url, json=body)
        except httpx.InvalidURL as error:
            raise JudgeFailed(f"{self._url}: {error}") from error
        except httpx.RequestError as error:
            raise _Transient(f"{type(error).__name__} {error}".strip()) from error
        if answer.status_code in TRANSIENT:
            raise _Transient(f"status {answer.status_code}", _retry_after(answer))
        if answer.status_code != 200:
            raise JudgeFailed(f"{self._url}: status {answer.status_code}: {answer.text[:200]}")
        score = read(_content(answer), self.options.verdict)
        if score is None:
            raise _Transient(f"no verdict: {answer.text[:200]}")
        return score


def _content(answer: httpx.Response) -> str:
    """The reply's text. Raises _Transient for a body of another form."""
    try:
        content = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _Transient(f"no chat completion: {answer.text[:200]}") from error
    if not isinstance(content, str):
        raise _Transient(f"no text: {answer.text[:200]}")
    return content


def _retry_after(answer: httpx.Response) -> float:
    """Seconds that the header asks for; 0 without one, or for a date."""
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else 0.0
