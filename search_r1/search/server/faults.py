"""Test faults: requests that fail or hang on purpose, to try out a client or a run.

Whether a search fails is drawn from the seed, request by request. The other routes, `/health`
included, always answer.
"""

import logging
import random
from collections import Counter

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from search_r1.search.settings import FaultConfig

logger = logging.getLogger(__name__)

HANG = "hang"
ANSWER = "answer"
GARBLED = "garbled"
TORN = "torn"
FAILURES = ("500", "503", GARBLED, TORN)
"""Ways to fail: two statuses, a good status with what is no answer, and half an answer."""
LOG_EVERY = 100
"""Requests between two lines that say what was done so far."""


class FaultInjector:
    """Spoils some requests to `/retrieve` before they reach `app`."""

    def __init__(self, app: ASGIApp, config: FaultConfig) -> None:
        """The n-th request has the same fate in every run of the same settings."""
        self._app = app
        self._config = config
        self._random = random.Random(config.inject_seed)
        self.fates: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, fail or hang."""
        is_search = scope["type"] == "http" and scope["path"].rstrip("/") == "/retrieve"
        fate = self._draw() if is_search else ANSWER
        if fate == ANSWER:
            await self._app(scope, receive, send)
        elif fate == HANG:
            while (await receive())["type"] != "http.disconnect":
                pass
        elif fate == TORN:
            await send({"type": "http.response.start", "status": 200,
                        "headers": [(b"content-length", b"20")]})  # fmt: skip
            half = {"type": "http.response.body", "body": b'{"result": [', "more_body": True}
            await send(half)
        elif fate == GARBLED:
            garbled = Response("<html>spoilt on purpose (--inject_failures)</html>")
            await garbled(scope, receive, send)
        else:
            problem = {"detail": "failed on purpose (--inject_failures)"}
            await JSONResponse(problem, int(fate))(scope, receive, send)

    def _draw(self) -> str:
        """The next request's fate."""
        lot, fate = self._random.random(), self._random.choice(FAILURES)
        if lot >= self._config.inject_failures:
            lot -= self._config.inject_failures
            fate = HANG if lot < self._config.inject_hangs else ANSWER
        self.fates[fate] += 1
        if self.fates.total() % LOG_EVERY == 0:
            logger.warning("test faults: of %d requests %s", self.fates.total(), dict(self.fates))
        return fate
