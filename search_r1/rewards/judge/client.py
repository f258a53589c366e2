"""The judge's HTTP connections, which all batches of a run share."""

import threading
import weakref
from typing import Any

import httpx

from search_r1.exchange import BoundedHttpClient, Response
from search_r1.rewards.judge.options import JudgeOptions

MAX_BYTES = 8 << 20
"""Maximum size of a response."""
KEEPALIVE_S = 1.0
"""Seconds after which an idle connection is not used again; servers close it after about 5 s."""


class JudgeClient:
    """Sends chat completions to the judge, at most `max_concurrency` at once, from any thread."""

    def __init__(self, options: JudgeOptions) -> None:
        """Read the certificates; it connects with the first request."""
        self.url = f"{options.url.rstrip('/')}/chat/completions"
        key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        limits = httpx.Limits(max_connections=options.max_concurrency, keepalive_expiry=KEEPALIVE_S)
        self._http = BoundedHttpClient(
            options.timeout, MAX_BYTES, url=self.url, headers=key, limits=limits
        )
        # The time that a request waits for another batch's is no part of its timeout.
        self._slots = threading.Semaphore(options.max_concurrency)
        self.close = weakref.finalize(self, self._http.close)
        """Closes the connections; called at the latest with the end of this object or process."""

    def post(self, fields: dict[str, Any]) -> Response:
        """Send a request. Raises as `BoundedHttpClient.send` does."""
        with self._slots:
            return self._http.send("POST", self.url, json=fields)
