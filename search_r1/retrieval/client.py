"""Asynchronous client of `POST /retrieve`: merged requests, retries, fail-over, typed errors.

Searches that coroutines of one event loop start within a few milliseconds share a request, in which
each distinct query appears once. The preferred server is used while it responds, otherwise the next
one; servers on this machine come first, the others are shuffled per process to spread the load.
Retries are counted in a context variable, since a request serves many tasks.
"""

import asyncio
import logging
import math
import os
import random
import socket
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Self, TypeVar

import httpx
import orjson
from pydantic import SecretStr

from search_r1.bearer import read_token
from search_r1.retrieval.errors import (
    REQUEST_LEVEL_STATUSES,
    RetrieverRefused,
    RetrieverUnavailable,
)
from search_r1.retrieval.protocol import add_retried
from search_r1.retrieval.responses import (
    InvalidResponse,
    check_status,
    parse_document,
    parse_documents,
    parse_object,
)
from search_r1.retrieval.schema import TOKEN_VARIABLE, Document, well_formed
from search_r1.retrying import Backoff, TransientError
from verl.errors import redact
from verl.ports import is_local_host

T = TypeVar("T")
logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line per request

EXAMPLE_URL = "http://127.0.0.1:8000"
COOLDOWN_S, MAX_COOLDOWN_S = 5.0, 60.0
"""Time for which a server that failed is not asked while others respond; longest `Retry-After`."""
CONNECT_S = 5.0
"""Timeout for opening a connection; counts towards the timeout of the attempt."""
LIMITS = httpx.Limits(max_connections=132, max_keepalive_connections=132)
DEADLINE_FIELD = "deadline_s"
"""Optional request field: seconds for which the client waits for the response to this attempt."""


@dataclass
class Server:
    """Address and health of one server; times are those of `time.monotonic`."""

    url: str
    has_failed: bool = False
    """Whether the last attempt failed."""
    retry_at: float = -math.inf
    """End of the cooldown after a failure; then a single request tests the server."""
    accepts_deadline: bool = True
    """False once the server refused a request because of the field `deadline_s`."""


SearchResult = tuple[list[Document], int]
"""The documents of one search, and the number of failed attempts before."""
Futures = list[asyncio.Future[SearchResult]]


@dataclass
class _LoopState:
    """The connections of an event loop, the searches that wait to be sent, and its requests."""

    http: httpx.AsyncClient
    waiting: dict[bytes, dict[str, Futures]] = field(default_factory=dict)
    """The searches that will share the next requests, by filter (json) and query."""
    deadline: float = math.inf
    """The earliest deadline of these searches (`time.monotonic`)."""
    timer: asyncio.TimerHandle | None = None
    """Sends them at the end of the merge window."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests in progress."""


class RetrievalClient:
    """A `Retrieval` over HTTP for any event loop; `async with` closes the current loop's part."""

    def __init__(
        self,
        url: str | Sequence[str],
        topk: int | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 5,
        deadline: float | None = None,
        backoff: float = 0.25,
        max_backoff: float = 8.0,
        max_retry_after: float = 30.0,
        max_batch: int = 256,
        merge_window: float = 0.003,
        token: str | None = None,
        log_level: int = logging.WARNING,
    ) -> None:
        """Create a client; nothing is sent yet.

        `url` is the base address of a server, with or without `/retrieve`; several, as a sequence
        or separated by commas, replace each other when one fails. `topk` None leaves the number of
        documents to the server. `timeout` (s) limits one attempt, `deadline` (s) the whole search,
        and `max_retries` the number of further attempts, on whichever server. The first delay is
        `backoff` s, each further one twice as long up to `max_backoff`; it is shortened by up to a
        half at random, but not below the server's `Retry-After`, at most `max_retry_after` s. Up to
        `max_batch` distinct queries, started within `merge_window` s, share a request. `token` is
        sent as bearer token; its default is the environment variable RETRIEVER_TOKEN. `log_level`
        is the level of the log line about each failed attempt.
        """
        if not timeout > 0 or (deadline is not None and not deadline > 0) or max_retries < 0:
            raise ValueError(
                f"timeout {timeout}, deadline {deadline}, max_retries {max_retries}; expected more "
                "than 0 seconds, and 0 or more retries"
            )
        self._urls = read_urls(url)
        self._topk = topk
        self._timeout, self._max_retries, self._log_level = timeout, max_retries, log_level
        self._backoff = Backoff(backoff, max_backoff, max_retry_after)
        self._deadline = math.inf if deadline is None else deadline
        self._max_batch, self._merge_window = max_batch, merge_window
        self._token = SecretStr(read_token(TOKEN_VARIABLE, token) or "")
        with_user = [u for u in self._urls if urllib.parse.urlsplit(u).username is not None]
        if with_user and self._token:
            raise ValueError(
                f"retriever url {redact(with_user[0])} with a user, and {TOKEN_VARIABLE} is set; "
                "expected only one of them, since both use the Authorization header"
            )

    def __repr__(self) -> str:
        return f"RetrievalClient({redact(','.join(self._urls))!r}, topk={self._topk})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without health and connections, for pickling."""
        return {k: v for k, v in vars(self).items() if k not in ("_states", "_servers")}

    @cached_property
    def _servers(self) -> list[Server]:
        """The servers in this process's order of preference."""
        return [Server(url) for url in order_by_preference(self._urls)]

    @cached_property
    def _states(self) -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState]:
        return weakref.WeakKeyDictionary()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base addresses of the servers in this process's order of preference."""
        return tuple(server.url for server in self._servers)

    async def search(self, query: str, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return the documents for one query that a `filter` leaves, if there is one, best first.

        Raises RetrieverUnavailable or RetrieverRefused.
        """
        if filter:
            from search_r1.retrieval.filters import check_filter  # noqa: PLC0415 - few have one

            await check_filter(self, filter)
        try:
            documents, num_retries = await self._enqueue(query, filter or None)
        except RetrieverUnavailable as error:
            add_retried(int(error.num_retries > 0))
            raise
        add_retried(int(num_retries > 0))
        return documents

    async def health(self) -> dict[str, Any]:
        """Return the first response to `/health`; asks each server at most once."""
        return await self._get("/health", parse_object, len(self._servers) - 1)

    async def info(self, path: str = "/info") -> dict[str, Any]:
        """Return the first response to `/info`, or another path, asking each server once."""
        return await self._get(path, parse_object, len(self._servers) - 1)

    async def document(self, id: str) -> Document | None:
        """Return the document with this id, or None; raises the same errors as `search`."""
        path = f"/document?{urllib.parse.urlencode({'id': well_formed(id)})}"
        try:
            return await self._get(path, parse_document, self._max_retries)
        except RetrieverRefused as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def aclose(self) -> None:
        """Finish this event loop's searches and close its connections."""
        state = self._states.pop(asyncio.get_running_loop(), None)
        if state is not None:
            self._send(state)
            await asyncio.gather(*state.tasks)
            await state.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _state(self) -> _LoopState:
        """Return the running event loop's connections.

        They ignore proxies of the environment, which would see the token and every query.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._states:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
            timeout = httpx.Timeout(None, connect=CONNECT_S)  # `_attempt` limits the whole time
            cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # keeps none
            self._states[loop] = _LoopState(
                httpx.AsyncClient(
                    headers=headers,
                    timeout=timeout,
                    limits=LIMITS,
                    trust_env=False,
                    cookies=cookies,
                    verify=any(url.startswith("https") for url in self._urls),  # reads certificates
                )
            )
        return self._states[loop]

    async def _enqueue(self, query: str, filter: Mapping[str, Any] | None) -> SearchResult:
        loop, state = asyncio.get_running_loop(), self._state()
        future: asyncio.Future[SearchResult] = loop.create_future()
        state.deadline = min(state.deadline, time.monotonic() + self._deadline)
        waiting = state.waiting.setdefault(orjson.dumps(filter, option=orjson.OPT_SORT_KEYS), {})
        waiting.setdefault(well_formed(query), []).append(future)
        if len(waiting) >= self._max_batch:
            self._send(state)
        elif state.timer is None:
            state.timer = loop.call_later(self._merge_window, self._send, state)
        return await future

    def _send(self, state: _LoopState) -> None:
        """Send the waiting queries, except those whose searches were all cancelled."""
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        waiting, end, state.waiting, state.deadline = state.waiting, state.deadline, {}, math.inf
        for filter, searches in waiting.items():
            if by_query := {q: fs for q, fs in searches.items() if not all(f.done() for f in fs)}:
                task = asyncio.ensure_future(self._search_all(end, filter, by_query))
                state.tasks.add(task)
                task.add_done_callback(state.tasks.discard)

    async def _search_all(self, end: float, filter: bytes, by_query: Mapping[str, Futures]) -> None:
        """Send one request, or one for each query if it is refused, and complete all futures."""
        # With scores, since the original Search-R1 server fails without them.
        body: dict[str, Any] = {"queries": [*by_query], "topk": self._topk, "return_scores": True}
        if filter != b"null":  # servers that know no filters are sent none
            body["filter"] = orjson.Fragment(filter)
        all_futures = [future for futures in by_query.values() for future in futures]
        parse = partial(parse_documents, len(by_query))
        try:
            results, num_retries = await self._exchange(
                "POST", "/retrieve", body, parse, self._max_retries, end
            )
            for futures, documents in zip(by_query.values(), results, strict=True):
                for future in futures:
                    if not future.done():
                        future.set_result((list(documents), num_retries))
        except Exception as error:  # noqa: BLE001 - it is raised by the searches
            is_query_refused = (
                isinstance(error, RetrieverRefused) and error.status not in REQUEST_LEVEL_STATUSES
            )
            if is_query_refused and len(by_query) > 1:
                parts = ({query: futures} for query, futures in by_query.items())
                await asyncio.gather(*(self._search_all(end, filter, part) for part in parts))
            for future in all_futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in all_futures:  # without effect on those that are done
                future.cancel()

    async def _get(self, path: str, parse: Callable[[httpx.Response], T], max_retries: int) -> T:
        deadline = time.monotonic() + self._deadline
        return (await self._exchange("GET", path, None, parse, max_retries, deadline))[0]

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        parse: Callable[[httpx.Response], T],
        max_retries: int,
        deadline: float,
    ) -> tuple[T, int]:
        """Return the parsed response and the number of failed attempts before it.

        While any server is available, the next attempt follows without a delay. A response for
        which `parse` raises InvalidResponse is requested once more. Raises RetrieverUnavailable,
        which names every server tried, or RetrieverRefused.
        """
        reasons: dict[str, str] = {}
        num_failed = num_delays = num_invalid = 0
        while num_failed <= max_retries:
            end = min(time.monotonic() + self._timeout, deadline)
            if end <= time.monotonic():
                break
            server = self._choose()
            try:
                result = await self._attempt(server, method, path, body, parse, end)
                server.has_failed, server.retry_at = False, -math.inf
                return result, num_failed
            except TransientError as error:
                num_failed += 1
                cooldown = min(error.retry_after, MAX_COOLDOWN_S) or COOLDOWN_S
                server.has_failed, server.retry_at = True, time.monotonic() + cooldown
                reasons[redact(server.url)] = str(error)
                if num_failed <= max_retries:  # the last one is in the error
                    logger.log(self._log_level, "retriever %s %s; attempt %d of %d",
                               redact(server.url), error, num_failed, max_retries + 1)  # fmt: skip
                num_invalid += isinstance(error, InvalidResponse)
                if num_invalid > 1 or (num_invalid and num_failed > max_retries):
                    raise RetrieverRefused(f"retriever {redact(server.url)} {error}") from error
                is_any_available = any(s.retry_at <= time.monotonic() for s in self._servers)
                if num_failed <= max_retries and not is_any_available:
                    delay = self._backoff.delay(num_delays, error.retry_after)
                    num_delays += 1
                    if time.monotonic() + delay >= deadline:
                        break
                    await asyncio.sleep(delay)
        raise _unavailable(reasons, num_failed, is_late=num_failed <= max_retries)

    def _choose(self) -> Server:
        """Return the most preferred server without cooldown, else the first to end its cooldown."""
        now = time.monotonic()
        for server in self._servers:
            if server.retry_at <= now:
                if server.has_failed:  # only this request tests it; others still skip it
                    server.retry_at = now + COOLDOWN_S
                return server
        return min(self._servers, key=lambda server: server.retry_at)

    async def _attempt(
        self,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        parse: Callable[[httpx.Response], T],
        end: float,
    ) -> T:
        """Make one attempt until `end`; raises TransientError or RetrieverRefused."""
        limit = max(0.001, end - time.monotonic())
        has_field = body is not None and server.accepts_deadline
        sent = {**body, DEADLINE_FIELD: round(limit, 3)} if body and has_field else body
        try:
            async with asyncio.timeout(limit):
                response = await self._state().http.request(
                    method, server.url + path, content=None if sent is None else orjson.dumps(sent)
                )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = " ".join(f"does not answer ({type(error).__name__}: {error})".split())
            raise TransientError(reason.replace(": )", ")")) from error
        try:
            check_status(response)
        except RetrieverRefused as error:
            if not has_field or DEADLINE_FIELD not in str(error):
                raise
            server.accepts_deadline = False  # an older server; repeat the attempt without the field
            return await self._attempt(server, method, path, body, parse, end)
        return parse(response)


def read_urls(url: str | Sequence[str]) -> tuple[str, ...]:
    """Return the base addresses in a sequence or a comma-separated string; raises ValueError."""
    urls = url.split(",") if isinstance(url, str) else list(url)
    if not urls:
        raise ValueError("no retriever url given; expected one or more, for example " + EXAMPLE_URL)
    bases: dict[str, None] = {}
    for address in map(str.strip, urls):
        try:
            parts = urllib.parse.urlsplit(address)
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
    order = list(urls)
    random.Random(f"{socket.gethostname()}/{os.getpid()}").shuffle(order)
    if len(order) == 1:
        return order
    return sorted(order, key=lambda u: not is_local_host(urllib.parse.urlsplit(u).hostname or ""))


def _unavailable(
    reasons: Mapping[str, str], num_failed: int, *, is_late: bool
) -> RetrieverUnavailable:
    """Return an error that names every server with its latest failure, and the fix."""
    tried = "; ".join(f"retriever {url} {reason}" for url, reason in reasons.items())
    late = ", since the deadline (retriever.deadline) leaves no time for another attempt"
    return RetrieverUnavailable(
        f"{tried or 'no retriever was asked'}; gave up after {num_failed} "
        f"attempt{'s' * (num_failed != 1)}{late if is_late else ''}: start the retriever (bash "
        "retrieval_launch.sh) or correct its url; if it is too slow, allow it more time "
        "(retriever.timeout and retriever.deadline of a run) or start several",
        num_retries=max(0, num_failed - 1),
        reason=tried,
    )
