"""HTTP requests to one of several retrieval servers, with retries, timeouts and fail-over.

The preferred server is used while it responds, otherwise the next one. Servers on this machine come
first; the others are shuffled per process to spread the load. After a failure a server has a
cooldown, then a single request tests it before it is used again.
"""

import asyncio
import logging
import math
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.retrying import Backoff, TransientError, parse_retry_after
from verl.errors import redact
from verl.ports import is_local_host

logger = logging.getLogger(__name__)

COOLDOWN_S = 5.0
"""Cooldown of a server after its first failure; doubles with each further failure."""
MAX_COOLDOWN_S = 60.0
DEADLINE_FIELD = "deadline_s"
"""Optional request field: seconds for which the client waits for the response to this attempt."""
OUTAGE_S = 30.0
"""After an exchange without any response, other exchanges make a single attempt for this long."""
MAX_RESPONSE_BYTES = 256 << 20
"""Six times the response to 256 queries with 100 long passages each."""
CONNECT_S = 5.0
"""Timeout for opening a connection; counts towards the timeout of the attempt."""
HEADERS = {"Content-Type": "application/json"}
FIX_TOKEN = "export RETRIEVER_TOKEN with the server's token"
FIX_ADDRESS = "give the address of a retrieval server, http://HOST:PORT/retrieve"
FIXES = {
    400: "give the server the url's host name with its --allowed_hosts",
    401: FIX_TOKEN,
    403: FIX_TOKEN,
    404: FIX_ADDRESS,
    405: FIX_ADDRESS,
    422: "ask for no more than the server allows (retriever.topk; the server's --max_topk)",
}
"""Advice in the error message for a refused request, by HTTP status."""
EXAMPLE_URL = "http://127.0.0.1:8000"
T = TypeVar("T")


@dataclass
class Server:
    """Address and health of one server; times are those of `time.monotonic`."""

    url: str
    num_failures: int = 0
    """Failures since the last response."""
    failed_at: float = -math.inf
    cooldown_until: float = -math.inf
    accepts_deadline: bool = True
    """False once the server refused a request because of the field `deadline_s`."""

    @property
    def cooldown(self) -> float:
        return min(MAX_COOLDOWN_S, COOLDOWN_S * 2.0 ** min(self.num_failures - 1, 10))


class Servers:
    """The servers of one client in order of preference; never empty."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [Server(url) for url in order_by_preference(urls)]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def choose(self) -> Server:
        """Return the most preferred server without cooldown, else the first to end its cooldown."""
        now = time.monotonic()
        for server in self._servers:
            if server.cooldown_until <= now:
                if server.num_failures:  # only this request tests it; others still skip it
                    server.cooldown_until = now + server.cooldown
                return server
        return min(self._servers, key=lambda server: server.cooldown_until)

    def has_available(self) -> bool:
        """Whether any server can be used without waiting for the end of its cooldown."""
        now = time.monotonic()
        return any(server.cooldown_until <= now for server in self._servers)

    def record_success(self, server: Server) -> None:
        """Note that `server` responded, which ends its cooldown."""
        server.num_failures = 0
        server.cooldown_until = -math.inf

    def record_failure(self, server: Server, start: float, retry_after: float) -> None:
        """Note a failed attempt begun at `start`, and begin a cooldown, of `retry_after` s if set.

        Attempts that were already in progress at the last failure are not counted again.
        """
        now = time.monotonic()
        if start >= server.failed_at:
            server.num_failures += 1
            server.failed_at = now
        cooldown = min(retry_after, MAX_COOLDOWN_S) or server.cooldown
        server.cooldown_until = max(server.cooldown_until, now + cooldown)


def read_urls(url: str | Sequence[str]) -> tuple[str, ...]:
    """Return the base addresses in a sequence or a comma-separated string; raises ValueError."""
    urls = url.split(",") if isinstance(url, str) else list(url)
    if not urls:
        raise ValueError("no retriever url given; expected one or more, for example " + EXAMPLE_URL)
    bases: dict[str, None] = {}
    for address in map(str.strip, urls):
        try:
            parts = urlsplit(address)
            host = (parts.hostname or "").encode("idna")  # as looking up the name does
            is_url = parts.scheme in ("http", "https") and host and parts.port != 0
        except ValueError:  # an invalid port, IPv6 address or name
            is_url = False
        if not is_url:
            raise ValueError(
                f"retriever url {redact(address)!r}; expected http:// or https:// and a host, for "
                f"example {EXAMPLE_URL} (several: {EXAMPLE_URL},http://10.0.0.6:8000)"
            )
        bases[address.rstrip("/").removesuffix("/retrieve")] = None
    return tuple(bases)


def order_by_preference(urls: Sequence[str]) -> list[str]:
    """Return servers on this machine first; equal ones in an order that differs by process."""
    if len(urls) == 1:
        return list(urls)
    order = list(urls)
    random.Random(f"{socket.gethostname()}/{os.getpid()}").shuffle(order)
    return sorted(order, key=lambda url: not is_local_host(urlsplit(url).hostname or ""))


class InvalidResponse(TransientError):
    """A response of status 200 that no retrieval server would send."""


@dataclass(frozen=True)
class RetryPolicy:
    """Timeout of each attempt (s), number of retries, and the delays between them."""

    timeout: float = 60.0
    max_retries: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    log_level: int = logging.WARNING
    """Level of the log line about each failed attempt."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout}; expected more than 0 seconds")
        if self.max_retries < 0:
            raise ValueError(f"max_retries {self.max_retries}; expected 0 or more")


@dataclass
class Response:
    """A complete HTTP response."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    def excerpt(self, length: int) -> str:
        """Return the first `length` bytes as one printable line of UTF-8, whatever the charset."""
        text = self.body[:length].decode("utf-8", "replace")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    def raise_for_status(self) -> None:
        """Raise TransientError for 429 and 5xx, RetrieverRefused for any other failure."""
        if 200 <= self.status < 300:
            return
        if self.status == 429 or 500 <= self.status < 600:
            reason = f"answers {self.status}: {self.excerpt(200)}"
            raise TransientError(reason, parse_retry_after(self.headers))
        fix = FIXES.get(self.status, FIX_ADDRESS if self.status < 400 else "")
        raise RetrieverRefused(
            f"retriever {self.url} refused with {self.status}, expected 200: "
            f"{self.excerpt(500)}{fix and '; fix: '}{fix}",
            self.status,
        )


@dataclass
class Failures:
    """The failed attempts of one exchange, by server, for its error message."""

    reasons: dict[str, str] = field(default_factory=dict)
    """The latest failure of each server."""
    counts: Counter[str] = field(default_factory=Counter)
    num_invalid: int = 0
    """Attempts that ended with an InvalidResponse."""

    def add(self, url: str, error: TransientError) -> None:
        self.reasons[url] = str(error)
        self.counts[url] += 1
        self.num_invalid += isinstance(error, InvalidResponse)

    def to_error(self, cause: str) -> RetrieverUnavailable:
        """Return an error that names every server with its latest failure, and the fix."""
        tried = "; ".join(
            f"retriever {url} {reason}"
            + (f" (and {self.counts[url] - 1} times before)" if self.counts[url] > 1 else "")
            for url, reason in self.reasons.items()
        )
        # More time is no help if nothing listens: aiohttp's ClientConnectorError.
        slow = ""
        if not tried or any("Connector" not in reason for reason in self.reasons.values()):
            slow = (
                "; if it is too slow, allow it more time (retriever.timeout and "
                "retriever.deadline of a run) or start several"
            )
        attempts = self.counts.total()
        count = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return RetrieverUnavailable(
            f"{tried or 'no retriever was asked'}; gave up after {count}"
            f"{cause}: start the retriever (bash retrieval_launch.sh) or correct its url{slow}",
            num_retries=max(0, attempts - 1),
            reason=tried,
        )


class Transport:
    """Sends each request to a server that responds, with retries and fail-over.

    An outage of all servers is detected by one exchange; the others then give up early.
    """

    def __init__(self, servers: Servers, policy: RetryPolicy) -> None:
        self.servers = servers
        self._policy = policy
        self._responded_at = self._outage_until = -math.inf

    async def exchange(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        parse: Callable[[Response], T],
        max_retries: int | None = None,
        deadline: float = math.inf,
    ) -> tuple[T, int]:
        """Return the parsed response and the number of failed attempts before it.

        `deadline` is a time of `time.monotonic`. While any server is available, the next attempt
        follows without a delay. A response for which `parse` raises InvalidResponse is requested
        once more. Raises RetrieverUnavailable, which names every server tried, or RetrieverRefused.
        """
        policy, failures, num_delays = self._policy, Failures(), 0
        retries = policy.max_retries if max_retries is None else max_retries
        # An exchange with a retry limit of its own, such as a health check, declares no outage.
        start = time.monotonic() if max_retries is None else -math.inf
        for attempt in range(retries + 1):
            limit = min(policy.timeout, deadline - time.monotonic())
            if limit <= 0:
                break
            server = self.servers.choose()
            try:
                return await self._attempt(http, server, method, path, body, limit, parse), attempt
            except TransientError as error:
                failures.add(redact(server.url), error)
                logger.log(policy.log_level, "retriever %s %s; attempt %d of %d",
                           redact(server.url), error, attempt + 1, retries + 1)  # fmt: skip
                is_last = attempt == retries
                if failures.num_invalid > 1 or (failures.num_invalid and is_last):
                    raise RetrieverRefused(f"retriever {server.url} {error}") from error
                if is_last:
                    self._declare_outage(start)
                    raise failures.to_error("") from error
                if attempt + 1 >= len(self.servers) and time.monotonic() < self._outage_until:
                    raise failures.to_error(", as other requests did shortly before") from error
                if not self.servers.has_available():
                    delay = policy.backoff.delay(num_delays, error.retry_after)
                    num_delays += 1
                    if time.monotonic() + delay >= deadline:
                        break
                    await asyncio.sleep(delay)
        if failures.reasons:  # otherwise the deadline had passed before any attempt
            self._declare_outage(start)
        raise failures.to_error(
            ", since the deadline (retriever.deadline) leaves no time for another attempt"
        )

    def _declare_outage(self, start: float) -> None:
        """Let other exchanges give up early, unless any had a response since `start`."""
        if self._responded_at < start:
            self._outage_until = time.monotonic() + OUTAGE_S

    def _record_success(self, server: Server) -> None:
        self.servers.record_success(server)
        self._responded_at = time.monotonic()
        self._outage_until = -math.inf

    async def _attempt(
        self,
        http: aiohttp.ClientSession,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit: float,
        parse: Callable[[Response], T],
    ) -> T:
        """Make one attempt within `limit` s; raises TransientError or RetrieverRefused."""
        start = time.monotonic()
        sent = body
        if body is not None and server.accepts_deadline:
            sent = {**body, DEADLINE_FIELD: round(limit, 3)}
        try:
            response = await _send(http, method, server.url + path, sent, limit)
            response.raise_for_status()
            result = parse(response)
        except TransientError as error:
            self.servers.record_failure(server, start, error.retry_after)
            raise
        except RetrieverRefused as error:
            self._record_success(server)
            if sent is body or DEADLINE_FIELD not in str(error):
                raise
            server.accepts_deadline = False  # an older server; repeat the attempt without the field
            limit = max(0.001, limit - (time.monotonic() - start))  # for aiohttp, 0 is no limit
            return await self._attempt(http, server, method, path, body, limit, parse)
        self._record_success(server)
        return result


async def _send(
    http: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, limit: float
) -> Response:
    """Return the complete response of any status; raises TransientError if none in `limit` s."""
    data = None if body is None else orjson.dumps(body)
    timeout = aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_S)
    try:
        async with http.request(
            method, url, data=data, headers=HEADERS, timeout=timeout, allow_redirects=False
        ) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise InvalidResponse(f"answered with more than {MAX_RESPONSE_BYTES} bytes")
            return Response(url, response.status, bytes(content), response.headers)
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = " ".join(f"does not answer ({type(error).__name__}: {error})".split())
        raise TransientError(reason.replace(": )", ")")) from error
