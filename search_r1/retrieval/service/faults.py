"""Injected faults: requests that fail or hang on purpose, to test a client or a training run.

The outcome of each search request is drawn from a seeded generator. Other routes always work.
"""

import logging
import random
from collections import Counter

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from search_r1.retrieval.settings import FaultConfig

logger = logging.getLogger(__name__)

ANSWER = "answer"
HANG = "hang"
INVALID = "invalid body"
TRUNCATED = "truncated"
FAILURES = ("500", "503", INVALID, TRUNCATED)
"""Failures: an HTTP status, a 200 with a body outside the contract, or a 200 with half a body."""
LOG_EVERY = 100
"""Number of requests between two log lines with the counts of outcomes."""


class FaultInjector:
    """ASGI middleware that lets some requests to `/retrieve` fail before they reach `app`."""

    def __init__(self, app: ASGIApp, config: FaultConfig) -> None:
        """With equal settings, the n-th request has the same outcome in every run."""
        self._app = app
        self._config = config
        self._random = random.Random(config.inject_seed)
        self._outcomes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_search = scope["type"] == "http" and scope["path"].rstrip("/") == "/retrieve"
        outcome = self._draw_outcome() if is_search else ANSWER
        if outcome == ANSWER:
            await self._app(scope, receive, send)
        elif outcome == HANG:
            while (await receive())["type"] != "http.disconnect":
                pass
        elif outcome == TRUNCATED:
            await send({"type": "http.response.start", "status": 200,
                        "headers": [(b"content-length", b"20")]})  # fmt: skip
            await send({"type": "http.response.body", "body": b'{"result": [', "more_body": True})
        elif outcome == INVALID:
            response = Response("<html>invalid on purpose (--inject_failures)</html>")
            await response(scope, receive, send)
        else:
            problem = {"detail": "failed on purpose (--inject_failures)"}
            await JSONResponse(problem, int(outcome))(scope, receive, send)

    def _draw_outcome(self) -> str:
        number, outcome = self._random.random(), self._random.choice(FAILURES)
        if number >= self._config.inject_failures:
            number -= self._config.inject_failures
            outcome = HANG if number < self._config.inject_hangs else ANSWER
        self._outcomes[outcome] += 1
        if (total := self._outcomes.total()) % LOG_EVERY == 0:
            logger.warning("test faults: of %d requests %s", total, dict(self._outcomes))
        return outcome
