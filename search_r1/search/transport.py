"""One exchange with a retriever: attempts bounded in number and time, pauses, and fail-over.

Of several servers the preferred one is asked while it answers, else the next. A server of this
machine is preferred; processes spread over the others. One that failed rests, and is then tried
with a single request before it is in service again. What is asked and how answers are read is in
`client`.
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

from search_r1.retrying import Backoff, TransientError, parse_retry_after
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from verl.errors import redact
from verl.ports import is_local_host

logger = logging.getLogger(__name__)

REST_S = 5.0
"""Rest after a first failure; it doubles with each further one."""
MAX_REST_S = 60.0
DEADLINE_FIELD = "deadline_s"
"""Optional field of a request: seconds for which this attempt waits for the answer."""
OUTAGE_S = 30.0
"""After an exchange that no server answered, for so long every other one tries just once."""
MOST_BYTES = 256 << 20
"""Of an answer: six times what 256 queries of 100 long passages come to."""
CONNECT_S = 5.0
"""Longest that a connection may take to be opened, of an attempt's time."""
JSON = {"Content-Type": "application/json"}
TOKEN = "export RETRIEVER_TOKEN with the server's token"
ADDRESS = "give the address of a retrieval server, http://HOST:PORT/retrieve"
FIXES = {
    401: TOKEN,
    403: TOKEN,
    404: ADDRESS,
    405: ADDRESS,
    421: "give the server this name with its --allowed_hosts, or its address as url",
    422: "ask for no more than the server allows (retriever.topk; the server's --max_topk)",
}
"""What mends a refusal, by its status."""
EXAMPLE = "http://127.0.0.1:8000"
T = TypeVar("T")


@dataclass
class Server:
    """One server's address and how it has answered so far; times are of `time.monotonic`."""

    url: str
    num_failures: int = 0
    """Failures since it last answered."""
    failed_at: float = -math.inf
    rests_until: float = -math.inf
    takes_deadline: bool = True
    """False once it refused the optional field `deadline_s`."""

    @property
    def rest(self) -> float:
        """Seconds that it rests after its failures."""
        return min(MAX_REST_S, REST_S * 2.0 ** min(self.num_failures - 1, 10))


class Servers:
    """The servers of one client in order of preference; never empty."""

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` are base addresses, as `read_urls` gives them."""
        self._servers = [Server(url) for url in preferred(urls)]

    @property
    def urls(self) -> tuple[str, ...]:
        """Base addresses, most preferred first."""
        return tuple(server.url for server in self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def choose(self) -> Server:
        """The most preferred server that does not rest, or the one whose rest ends first."""
        now = time.monotonic()
        for server in self._servers:
            if server.rests_until <= now:
                if server.num_failures:  # one request tries it, the others still pass it by
                    server.rests_until = now + server.rest
                return server
        return min(self._servers, key=lambda server: server.rests_until)

    def has_ready(self) -> bool:
        """Whether a server can be asked without waiting."""
        now = time.monotonic()
        return any(server.rests_until <= now for server in self._servers)

    def has_sound(self) -> bool:
        """Whether a server has not failed since it last answered."""
        return any(not server.num_failures for server in self._servers)

    def succeeded(self, server: Server) -> None:
        """`server` answered and is in service."""
        server.num_failures, server.rests_until = 0, -math.inf

    def failed(self, server: Server, started: float, retry_after: float) -> None:
        """`server` failed what began at `started`; it rests `retry_after` s where it says so."""
        now = time.monotonic()
        if started >= server.failed_at:
            server.num_failures += 1
            server.failed_at = now
        rest = min(retry_after, MAX_REST_S) or server.rest
        server.rests_until = max(server.rests_until, now + rest)


def read_urls(url: str | Sequence[str]) -> tuple[str, ...]:
    """Base addresses of one or more urls, also with commas between; raises ValueError."""
    given = url.split(",") if isinstance(url, str) else list(url)
    if not given:
        raise ValueError("no retriever url given; expected one or more, for example " + EXAMPLE)
    bases: dict[str, None] = {}
    for one in map(str.strip, given):
        try:
            parts = urlsplit(one)
            is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no port, or no IPv6 address
            is_url = False
        if not is_url:
            raise ValueError(
                f"retriever url {redact(one)!r}; expected http:// or https:// and a host, for "
                f"example {EXAMPLE} (several: {EXAMPLE},http://10.0.0.6:8000)"
            )
        bases[one.rstrip("/").removesuffix("/retrieve")] = None
    return tuple(bases)


def preferred(urls: Sequence[str]) -> list[str]:
    """This machine's servers first; within and after them an order of this process's own."""
    if len(urls) == 1:
        return list(urls)
    order = list(urls)
    random.Random(f"{socket.gethostname()}/{os.getpid()}").shuffle(order)
    return sorted(order, key=lambda url: not is_local_host(urlsplit(url).hostname or ""))


class Garbled(TransientError):
    """An answer of status 200 that no retrieval server would give."""


@dataclass(frozen=True)
class Patience:
    """How long and how often a server is asked; `timeout` of an attempt in seconds."""

    timeout: float = 60.0
    max_retries: int = 5
    pauses: Backoff = field(default_factory=Backoff)
    log_level: int = logging.WARNING
    """Of the line about each attempt that failed."""

    def __post_init__(self) -> None:
        """Refuse what could never be answered."""
        if not self.timeout > 0:
            raise ValueError(f"timeout {self.timeout}; expected more than 0 seconds")
        if self.max_retries < 0:
            raise ValueError(f"max_retries {self.max_retries}; expected 0 or more")


@dataclass
class Answer:
    """What a server answered."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    def excerpt(self, length: int) -> str:
        """The beginning of the body as one printable line, whatever charset it claims to have."""
        text = self.body[:length].decode("utf-8", "replace")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    def check(self) -> None:
        """Raise TransientError where another attempt may help, RetrieverRefused where none will."""
        if 200 <= self.status < 300:
            return
        if self.status == 429 or 500 <= self.status < 600:
            reason = f"answers {self.status}: {self.excerpt(200)}"
            raise TransientError(reason, parse_retry_after(self.headers))
        fix = FIXES.get(self.status, ADDRESS if self.status < 400 else "")
        raise RetrieverRefused(
            f"retriever {self.url} refused with {self.status}, expected 200: "
            f"{self.excerpt(500)}{fix and '; fix: '}{fix}",
            self.status,
        )


@dataclass
class Failures:
    """The failed attempts of one exchange, by server, for its error."""

    reasons: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    num_garbled: int = 0

    def add(self, url: str, error: TransientError) -> None:
        """`url`'s last reason and one more attempt."""
        self.reasons[url] = str(error)
        self.counts[url] += 1
        self.num_garbled += isinstance(error, Garbled)

    def error(self, cause: str) -> RetrieverUnavailable:
        """Every url that was tried with its last reason, and the fix."""
        tried = "; ".join(
            f"retriever {url} {reason}"
            + (f" (and {self.counts[url] - 1} times before)" if self.counts[url] > 1 else "")
            for url, reason in self.reasons.items()
        )
        slow = ""
        if not tried or any("Connector" not in reason for reason in self.reasons.values()):
            slow = (
                "; where it is too slow, allow it more time (retriever.timeout and "
                "retriever.deadline of a run) or start several"
            )
        return RetrieverUnavailable(
            f"{tried or 'no retriever was asked'}; gave up after {self.counts.total()} attempts"
            f"{cause}: start the retriever (bash retrieval_launch.sh) or correct its url{slow}",
            num_retries=max(0, self.counts.total() - 1),
            reason=tried,
        )


class Transport:
    """Sends requests to whichever of the servers answers; an outage is found out once."""

    def __init__(self, servers: Servers, patience: Patience) -> None:
        self.servers = servers
        self._patience = patience
        self._answered_at = self._outage_until = -math.inf

    async def exchange(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        read: Callable[[Answer], T],
        max_retries: int | None = None,
        deadline: float = math.inf,
    ) -> tuple[T, int]:
        """What `read` makes of the first good answer before `deadline`, a `time.monotonic`, and how
        many attempts failed before it.

        While a server is in service there is no pause before it is asked. An answer that `read`
        finds Garbled is asked for once more. Raises RetrieverUnavailable, which names every server
        tried, or RetrieverRefused.
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
                return await self._attempt(http, server, method, path, body, limit, read), attempt
            except TransientError as error:
                failures.add(redact(server.url), error)
                logger.log(patience.log_level, "retriever %s %s; attempt %d of %d",
                           redact(server.url), error, attempt + 1, retries + 1)  # fmt: skip
                if failures.num_garbled > 1 or (failures.num_garbled and attempt == retries):
                    raise RetrieverRefused(f"retriever {server.url} {error}") from error
                if attempt == retries:
                    self._give_up(begun)
                    raise failures.error("") from error
                if attempt + 1 >= len(self.servers) and time.monotonic() < self._outage_until:
                    raise failures.error(", as others did shortly before") from error
                if not self.servers.has_ready():
                    pause = patience.pauses.delay(num_pauses, error.retry_after)
                    num_pauses += 1
                    if time.monotonic() + pause >= deadline:
                        break
                    await asyncio.sleep(pause)
        if failures.reasons:  # else it came too late to ask anyone
            self._give_up(begun)
        raise failures.error(
            ", since the deadline (retriever.deadline) is over before the next could be answered"
        )

    def _give_up(self, begun: float) -> None:
        """Spare others the wait, if none was answered since `begun` (-inf: spare nothing)."""
        if self._answered_at < begun:
            self._outage_until = time.monotonic() + OUTAGE_S

    def _answered(self, server: Server) -> None:
        """`server` is in service, so there is no outage."""
        self.servers.succeeded(server)
        self._answered_at, self._outage_until = time.monotonic(), -math.inf

    async def _attempt(
        self,
        http: aiohttp.ClientSession,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit: float,
        read: Callable[[Answer], T],
    ) -> T:
        """One exchange within `limit` s; raises TransientError or RetrieverRefused."""
        started = time.monotonic()
        if body is not None and server.takes_deadline:
            body = {**body, DEADLINE_FIELD: round(limit, 3)}
        try:
            answer = await _send(http, method, server.url + path, body, limit)
            answer.check()
            found = read(answer)
        except TransientError as error:
            self.servers.failed(server, started, error.retry_after)
            raise
        except RetrieverRefused as error:
            self._answered(server)
            if server.takes_deadline and body is not None and DEADLINE_FIELD in str(error):
                server.takes_deadline = False
                raise TransientError(f"does not know the field {DEADLINE_FIELD}") from error
            raise
        self._answered(server)
        return found


async def _send(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    limit: float,
) -> Answer:
    """The whole answer within `limit` s, of whatever status; raises TransientError without one."""
    data = None if body is None else orjson.dumps(body)
    timeout = aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_S)
    try:
        async with http.request(
            method, url, data=data, headers=JSON, timeout=timeout, allow_redirects=False
        ) as answer:
            content = bytearray()
            async for part in answer.content.iter_any():
                content += part
                if len(content) > MOST_BYTES:
                    raise Garbled(f"answered with more than {MOST_BYTES} bytes")
            return Answer(url, answer.status, bytes(content), answer.headers)
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = " ".join(f"does not answer ({type(error).__name__}: {error})".split())
        raise TransientError(reason.replace(": )", ")")) from error
