"""One exchange with a retriever: attempts bounded in number and time, pauses, and fail-over.

Which server is asked is decided in `servers`, what is asked and how answers are read in `client`.
"""

import asyncio
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.search.servers import Server, Servers

logger = logging.getLogger(__name__)

DEADLINE_FIELD = "deadline_s"
"""Optional field of a request: seconds for which this attempt waits for the answer."""
OUTAGE_S = 30.0
"""After an exchange that no server answered, for so long every other one tries just once."""
NUM_RETRIES = "num_retries"
"""The entry of an answer's `extensions` that says how many attempts failed before it."""

_random = random.SystemRandom()  # seeding `random`, as training does, must not align the pauses


@dataclass(frozen=True)
class Patience:
    """How long and how often a server is asked; times in seconds."""

    timeout: float = 60.0
    max_retries: int = 5
    backoff: float = 0.25
    max_backoff: float = 8.0
    max_retry_after: float = 30.0
    log_level: int = logging.WARNING
    """Of the line about each attempt that failed."""

    def __post_init__(self) -> None:
        """Refuse what could never be answered."""
        if not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout}; expected more than 0 seconds")
        if self.max_retries < 0:
            raise ValueError(f"max_retries {self.max_retries}; expected 0 or more")

    def pause(self, num_pauses: int, retry_after: float) -> float:
        """Exponential, bounded, with jitter; never shorter than what the server asked for."""
        longest = min(self.max_backoff, self.backoff * 2.0 ** min(num_pauses, 60))
        asked = min(self.max_retry_after, retry_after)
        return max(longest * _random.uniform(0.5, 1.0), asked * _random.uniform(1.0, 1.1))


class AttemptFailed(Exception):
    """One attempt failed in a way that another may not; `retry_after` s were asked for."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass
class Failures:
    """The failed attempts of one exchange, by server, for its error."""

    reasons: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, url: str, error: AttemptFailed) -> None:
        """`url`'s last reason and one more attempt."""
        self.reasons[url] = str(error)
        self.counts[url] += 1

    def error(self, cause: str) -> RetrieverUnavailable:
        """Every url that was tried with its last reason, and the fix."""
        tried = "; ".join(
            f"retriever {url} {reason}" + (f" (and {count - 1} times before)" if count > 1 else "")
            for (url, reason), count in zip(self.reasons.items(), self.counts.values(), strict=True)
        )
        return RetrieverUnavailable(
            f"{tried or 'no retriever was asked'}; gave up after {self.counts.total()} attempts"
            f"{cause}: start the retriever (bash retrieval_launch.sh) or correct its url",
            num_retries=max(0, self.counts.total() - 1),
            reason=tried,
        )


class Transport:
    """Sends requests to whichever of the servers answers.

    An outage is found out once, not by each search again: see `OUTAGE_S`.
    """

    def __init__(self, servers: Servers, patience: Patience) -> None:
        self.servers = servers
        self._patience = patience
        self._answered_at = self._outage_until = -math.inf

    async def exchange(
        self,
        http: httpx.AsyncClient,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        max_retries: int | None = None,
        deadline: float = math.inf,
    ) -> httpx.Response:
        """The first good answer before `deadline`, a time of `time.monotonic`.

        While a server is in service there is no pause before it is asked. Raises
        RetrieverUnavailable, which names every server tried, or RetrieverRefused.
        """
        patience, failures, num_pauses = self._patience, Failures(), 0
        begun = time.monotonic() if max_retries is None else -math.inf
        retries = patience.max_retries if max_retries is None else max_retries
        for attempt in range(retries + 1):
            limit = min(patience.timeout, deadline - time.monotonic())
            if limit <= 0:
                break
            server = self.servers.choose()
            try:
                answer = await self._attempt(http, server, method, path, body, limit)
                answer.extensions[NUM_RETRIES] = attempt
                return answer
            except AttemptFailed as error:
                failures.add(server.url, error)
                logger.log(patience.log_level, "retriever %s %s; attempt %d of %d", server.url,
                           error, attempt + 1, retries + 1)  # fmt: skip
                if attempt == retries:
                    self._give_up(begun)
                    raise failures.error("") from error
                if attempt + 1 >= len(self.servers) and time.monotonic() < self._outage_until:
                    raise failures.error(", as others did shortly before") from error
                if not self.servers.has_ready():
                    pause = patience.pause(num_pauses, error.retry_after)
                    num_pauses += 1
                    if time.monotonic() + pause >= deadline:
                        break
                    await asyncio.sleep(pause)
        self._give_up(begun)
        raise failures.error(", since the deadline is over before the next could be answered")

    def _give_up(self, begun: float) -> None:
        """Spare other exchanges the wait, if none was answered since this one of all tries began.

        A time before all others, as of one that was to try less, spares nothing.
        """
        if self._answered_at < begun:
            self._outage_until = time.monotonic() + OUTAGE_S

    def _answered(self, server: Server) -> None:
        """`server` is in service, so there is no outage."""
        self.servers.succeeded(server)
        self._answered_at, self._outage_until = time.monotonic(), -math.inf

    async def _attempt(
        self,
        http: httpx.AsyncClient,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit: float,
    ) -> httpx.Response:
        """One exchange within `limit` s; raises AttemptFailed or RetrieverRefused."""
        started = time.monotonic()
        if body is not None and server.takes_deadline:
            body = {**body, DEADLINE_FIELD: round(limit, 3)}
        try:
            async with asyncio.timeout(limit):
                answer = await http.request(method, server.url + path, json=body, timeout=limit)
            _check(answer)
        except (httpx.RequestError, TimeoutError) as error:
            self.servers.failed(server, started, 0.0)
            reason = f"does not answer ({type(error).__name__}: {error})"
            raise AttemptFailed(reason.replace(": )", ")")) from error
        except AttemptFailed as error:
            self.servers.failed(server, started, error.retry_after)
            raise
        except RetrieverRefused as error:
            self._answered(server)
            if server.takes_deadline and body is not None and DEADLINE_FIELD in str(error):
                server.takes_deadline = False
                raise AttemptFailed(f"does not know the field {DEADLINE_FIELD}") from error
            raise
        self._answered(server)
        return answer


def _check(answer: httpx.Response) -> None:
    """Raises AttemptFailed where another attempt may help, RetrieverRefused where none will."""
    status = answer.status_code
    if status == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
        raise AttemptFailed(f"answers {status}: {excerpt(answer, 200)}", retry_after(answer))
    if answer.is_success:
        return
    hint = ""
    if status == httpx.codes.UNAUTHORIZED:
        hint = "; set the environment variable RETRIEVER_TOKEN to the server's token"
    raise RetrieverRefused(
        f"retriever {answer.url} refused with {status}, expected 200: {excerpt(answer, 500)}{hint}",
        status,
    )


def excerpt(answer: httpx.Response, length: int) -> str:
    """The beginning of the body as text, whatever charset it claims to have."""
    return answer.content[:length].decode("utf-8", "replace")


def retry_after(answer: httpx.Response) -> float:
    """Seconds of the header `Retry-After`, a number or an HTTP date; 0 where there is none."""
    text = answer.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    until, now = _date(text), _date(answer.headers.get("Date", "")) or datetime.now(UTC)
    return 0.0 if until is None else max(0.0, (until - now).total_seconds())


def _date(text: str) -> datetime | None:
    """An HTTP date; None for anything else."""
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
