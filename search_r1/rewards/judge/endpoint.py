"""Requests to the judge: tried again with growing pauses, and a circuit that opens when it is down.

Plain httpx rather than the openai client, which reads a key, an organisation and headers from the
environment, follows redirects, and knows no second try for a reply that is no verdict.
"""

import json
import logging
import threading
from typing import Self

import httpx

from search_r1.exchange import Exchanges
from search_r1.retrying import Pauses, Transient, retry_after, try_again
from search_r1.rewards.judge.options import JudgeOptions
from search_r1.rewards.judge.verdict import read

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses under which another try may succeed."""
MAX_PAUSE_S = 30.0
MOST_BYTES = 8 << 20
"""Of a completion."""


class JudgeFailed(Exception):
    """No verdict was to be had."""


class JudgeEndpoint:
    """An OpenAI-compatible chat endpoint for one batch; safe to use from several threads."""

    def __init__(self, options: JudgeOptions) -> None:
        """Open no connection yet."""
        self.options = options
        self._url = f"{options.url.rstrip('/')}/chat/completions"
        self._pauses = Pauses(options.first_pause, MAX_PAUSE_S, MAX_PAUSE_S)
        key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        limits = httpx.Limits(max_connections=options.max_concurrency)
        self._exchanges = Exchanges(options.timeout, MOST_BYTES, headers=key, limits=limits)
        self._failures = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Serve a batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._exchanges.close()

    def judge(self, message: str) -> float:
        """The verdict on one message, 0 to 1. Raises JudgeFailed when every try has failed.

        Once as many messages in a row as may be under way at a time have failed for good, the
        judge is taken to be down, and the rest of the batch fails at once.
        """
        if self._failures >= self.options.max_concurrency:
            raise JudgeFailed("the judge is down")
        try:
            score = try_again(lambda: self._try(message), self.options.max_retries, self._pauses)
        except (Transient, JudgeFailed) as error:
            with self._lock:
                self._failures += 1
                is_first = self._failures == 1
            logger.log(logging.WARNING if is_first else logging.DEBUG, "judge: %s", error)
            raise JudgeFailed(str(error)) from error
        with self._lock:
            self._failures = 0
        return score

    def _try(self, message: str) -> float:
        """One request. Raises Transient, or JudgeFailed where trying again is of no use."""
        body = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": 0,
            "max_tokens": self.options.max_tokens,
        }
        try:
            answer = self._exchanges.send("POST", self._url, json=body)
        except httpx.InvalidURL as error:
            raise JudgeFailed(f"{self._url}: {error}") from error
        except httpx.RequestError as error:
            raise Transient(f"{type(error).__name__} {error}".strip()) from error
        except ValueError as error:
            raise Transient(f"no chat completion: {error}") from error
        if answer.status in TRANSIENT:
            raise Transient(f"status {answer.status}", retry_after(answer.headers))
        if answer.status != 200:
            raise JudgeFailed(f"{self._url}: status {answer.status}: {answer.text[:200]}")
        try:
            reply = json.loads(answer.body)["choices"][0]["message"]["content"]
            score = read(reply, self.options.verdict)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Transient(f"no chat completion: {answer.text[:200]}") from error
        if score is None:
            raise Transient(f"no verdict: {answer.text[:200]}")
        return score
