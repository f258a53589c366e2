"""The asynchronous client of `/retrieve`: pooled, merging, retrying, with typed errors.

Searches that coroutines of one event loop start within a few milliseconds travel in one request,
equal ones once; those that are only predicted travel apart. Retries and fail-over live in
`transport`; how many searches of a task needed them is counted in a context variable, so that
`search` stays a function of a query, and a request of many trajectories still tells each of them.
"""

import asyncio
import json
import logging
import math
import os
import re
import socket
import sys
import time
import urllib.parse
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import SecretStr

from search_r1.retrying import Backoff
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable, SearchError
from search_r1.search.retrieval import EmptyRetrieval, InMemoryRetrieval, Retrieval
from search_r1.search.schema import TOKEN_VARIABLE, Document, from_wire, well_formed
from search_r1.search.transport import Answer, Garbled, Patience, Servers, Transport, read_urls
from verl.errors import redact

__all__ = ["Document", "EmptyRetrieval", "InMemoryRetrieval", "Retrieval", "RetrievalClient"]

T = TypeVar("T")

RETRIED = "searches_retried"
"""Searches that one attempt was not enough for, whether or not they were answered then."""
NOT_FOUND = 404
REQUEST_LEVEL_STATUSES = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 421})
"""Refusals that no single query of a request can be the cause of."""
MOST_REQUESTS, MOST_AHEAD = 100, 32
"""Requests that may be under way at once: those that somebody waits for, and those sent ahead."""
SAME_DEADLINE_S = 0.5
"""Searches whose deadlines differ by no more may share a request."""
DEAD_S = 10
"""After so many seconds without a sign of life of the peer's machine a connection is given up."""

_counts: ContextVar[Counter[str] | None] = ContextVar("counts", default=None)


@contextmanager
def count_retries() -> Iterator[Counter[str]]:
    """How many of the searches that the body awaits were tried again, under RETRIED."""
    counts = Counter({RETRIED: 0})
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


Found = tuple[list[Document], int]
"""What one search found, and how many attempts failed before."""
Waiters = list[asyncio.Future[Found]]


@dataclass
class _Merged:
    """Searches that will share a request, since a request has one deadline."""

    deadline: float
    """When the first of them must have its answer."""
    waiting: dict[str, Waiters] = field(default_factory=dict)
    """Who waits for each query."""

    def takes(self, deadline: float) -> bool:
        """Whether a search with this deadline may be one of them; both may have none (inf)."""
        return deadline == self.deadline or abs(deadline - self.deadline) <= SAME_DEADLINE_S


@dataclass
class _Lane:
    """Searches of one kind."""

    http: aiohttp.ClientSession
    max_retries: int | None = None
    """Of each request; None: as many as the client may make."""
    merged: list[_Merged] = field(default_factory=list)
    """What is not yet sent."""
    timer: asyncio.TimerHandle | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass
class _LoopState:
    """What belongs to one event loop: its connections, and the searches that it makes."""

    http: aiohttp.ClientSession
    wanted: _Lane = field(init=False)
    ahead: _Lane = field(init=False)

    def __post_init__(self) -> None:
        self.wanted, self.ahead = _Lane(self.http), _Lane(self.http, max_retries=0)

    def __del__(self) -> None:
        """Close without a word: aiohttp logs two errors for what nobody closed."""
        connector = self.http.connector
        if connector is not None:
            self.http.detach()
            next(connector.close().__await__(), None)


class RetrievalClient:
    """A `Retrieval` over HTTP, usable from any event loop; `async with` closes the loop's own."""

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
        """Nothing is sent yet.

        `url` is a server's base address, or ends in `/retrieve`; several, in a sequence or with
        commas between them, stand in for each other. `topk` None leaves the number of documents to
        the server. `timeout` (s) bounds one attempt, `deadline` (s) the whole search; after
        `max_retries` more attempts, on whichever server, a search fails. The n-th pause is
        `backoff` * 2^n s, at most `max_backoff`, cut by up to a half at random, or what the server
        asks for, at most `max_retry_after` s. At most `max_batch` different queries, started within
        `merge_window` s, share a request. `token` is sent as bearer; its default is the environment
        variable RETRIEVER_TOKEN. `log_level` is that of the line about each attempt that failed.
        """
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline {deadline}; expected more than 0 seconds, or None")
        self._urls = read_urls(url)
        pauses = Backoff(backoff, max_backoff, max_retry_after)
        self._patience = Patience(timeout, max_retries, pauses, log_level)
        self._topk = topk
        self._deadline = math.inf if deadline is None else deadline
        self._max_batch = max_batch
        self._merge_window = merge_window
        self._token = _token(os.environ.get(TOKEN_VARIABLE) if token is None else token)
        named = [one for one in self._urls if urllib.parse.urlsplit(one).username is not None]
        if named and self._token is not None:
            raise ValueError(
                f"retriever url {redact(named[0])} with a user, and {TOKEN_VARIABLE} set; expected "
                "one of them, since a request has room for one"
            )
        self._connect()

    def __repr__(self) -> str:
        return f"RetrievalClient({redact(','.join(self._urls))!r}, topk={self._topk})"

    def __getstate__(self) -> dict[str, Any]:
        """Settings only, so that a client can be sent to another process."""
        return {k: v for k, v in vars(self).items() if k not in ("_states", "_transport")}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        """The settings of another process's client, without its connections."""
        vars(self).update(settings)
        self._connect()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base addresses of the servers in the order in which this process prefers them."""
        return self._transport.servers.urls

    async def search(self, query: str, began: float | None = None) -> list[Document]:
        """The documents for one query, best first; the deadline counts from `began`, or from now.

        Raises RetrieverUnavailable or RetrieverRefused.
        """
        num_retries = 0
        try:
            documents, num_retries = await self._ask(self._state().wanted, query, began)
        except RetrieverUnavailable as error:
            num_retries = error.num_retries
            raise
        finally:
            if (counts := _counts.get()) is not None:
                counts[RETRIED] += int(num_retries > 0)
        return documents

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` is in nobody's way: a server is well, connections are free."""
        state = self._state()
        is_free = len(state.wanted.tasks) < MOST_REQUESTS and len(state.ahead.tasks) < MOST_AHEAD
        return is_free and self._transport.servers.has_sound()

    async def prefetch(self, query: str) -> list[Document]:
        """As `search`, for an answer that may never be wanted: with one attempt, and uncounted."""
        return (await self._ask(self._state().ahead, query))[0]

    async def _ask(self, lane: _Lane, query: str, began: float | None = None) -> Found:
        """One search, in a request with others of its lane."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Found] = loop.create_future()
        deadline = (time.monotonic() if began is None else began) + self._deadline
        fit = (one for one in lane.merged if one.takes(deadline))
        if (merged := next(fit, None)) is None:
            merged = _Merged(deadline)
            lane.merged.append(merged)
        merged.deadline = min(merged.deadline, deadline)
        merged.waiting.setdefault(well_formed(query), []).append(future)
        if len(merged.waiting) >= self._max_batch:
            self._send(lane)
        elif lane.timer is None:
            lane.timer = loop.call_later(self._merge_window, self._send, lane)
        return await future

    async def health(self) -> dict[str, Any]:
        """The first answer to `/health`, each server asked once at most; raises as `search`."""
        return await self._get("/health", _object)

    async def info(self) -> dict[str, Any]:
        """The first answer to `/info`, asked for as `health` is."""
        return await self._get("/info", _object)

    async def document(self, id: str) -> Document | None:
        """The document with this id, or None; raises RetrieverUnavailable or RetrieverRefused."""
        path = f"/document?{urllib.parse.urlencode({'id': well_formed(id)})}"
        try:
            return await self._get(path, _document, is_patient=True)
        except RetrieverRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _get(self, path: str, read: Callable[[Answer], T], is_patient: bool = False) -> T:
        """What `read` makes of the answer to a GET; impatiently, each server is asked once."""
        transport, deadline = self._transport, time.monotonic() + self._deadline
        retries = None if is_patient else len(transport.servers) - 1
        http = self._state().http
        found, _ = await transport.exchange(
            http, "GET", path, read=read, max_retries=retries, deadline=deadline
        )
        return found

    async def aclose(self) -> None:
        """Finish what was asked in this event loop, but for predictions; close its connections."""
        state = self._states.pop(asyncio.get_running_loop(), None)
        if state is None:
            return
        self._send(state.wanted)
        self._send(state.ahead)
        await asyncio.gather(*state.wanted.tasks)
        await asyncio.sleep(0)  # a task that has begun tells those that wait for it
        for task in state.ahead.tasks:
            task.cancel()
        await asyncio.gather(*state.ahead.tasks, return_exceptions=True)
        await state.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    def _connect(self) -> None:
        """What no other process can use: the order of servers, and connections."""
        self._transport = Transport(Servers(self._urls), self._patience)
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = (
            weakref.WeakKeyDictionary()
        )

    def _state(self) -> _LoopState:
        """This event loop's connections. Proxies of the environment are not for a local server."""
        loop = asyncio.get_running_loop()
        if loop not in self._states:
            headers = {}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
            connector = aiohttp.TCPConnector(
                limit=MOST_REQUESTS + MOST_AHEAD, socket_factory=_open_socket
            )
            self._states[loop] = _LoopState(
                aiohttp.ClientSession(connector=connector, headers=headers)
            )
        return self._states[loop]

    def _send(self, lane: _Lane) -> None:
        """Start the requests with every search that waits."""
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        merged, lane.merged = lane.merged, []
        for one in merged:
            wanted = {q: who for q, who in one.waiting.items() if not all(f.done() for f in who)}
            if wanted:
                task = asyncio.ensure_future(self._serve(lane, one.deadline, wanted))
                lane.tasks.add(task)
                task.add_done_callback(lane.tasks.discard)

    async def _serve(self, lane: _Lane, deadline: float, waiting: Mapping[str, Waiters]) -> None:
        """Give each waiter documents or an error; a refused batch is asked one by one.

        Scores are asked for because the original server fails without them.
        """
        body = {"queries": list(waiting), "topk": self._topk, "return_scores": True}
        futures = [future for waiters in waiting.values() for future in waiters]
        try:
            found, num_retries = await self._transport.exchange(
                lane.http, "POST", "/retrieve", body, read=partial(_documents, len(waiting)),
                max_retries=lane.max_retries, deadline=deadline,
            )  # fmt: skip
            for waiters, documents in zip(waiting.values(), found, strict=True):
                for future in (one for one in waiters if not one.done()):
                    future.set_result((list(documents), num_retries))
        except SearchError as error:
            is_of_one = (
                isinstance(error, RetrieverRefused) and error.status not in REQUEST_LEVEL_STATUSES
            )
            if is_of_one and len(waiting) > 1:
                parts = ({query: waiters} for query, waiters in waiting.items())
                await asyncio.gather(*(self._serve(lane, deadline, part) for part in parts))
            for future in (one for one in futures if not one.done()):
                future.set_exception(error)
        finally:
            for future in futures:  # whatever happened, nobody is left waiting
                future.cancel()


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices in DEAD_S that its peer is gone, whatever an attempt's time is."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // 2)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // 2)
    return made


def _token(text: str | None) -> SecretStr | None:
    """A bearer token, or none for an empty text; what cannot stand in a header is refused."""
    if not text:
        return None
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(
            "the retriever's token (not shown) has spaces or characters that a header cannot hold; "
            f"expected printable ASCII: correct {TOKEN_VARIABLE}"
        )
    return SecretStr(text)


def _documents(num_queries: int, answer: Answer) -> list[list[Document]]:
    """The documents of an answer; raises Garbled if it is outside the contract."""
    parsed = _object(answer)
    try:
        if not all(isinstance(found, list) for found in parsed["result"]):
            raise TypeError("a result that is not a list of documents")
        found = from_wire(parsed)
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(answer, repr(error)) from error
    if len(found) != num_queries:
        raise _outside_contract(answer, f"{len(found)} results for {num_queries} queries")
    if re.search(rb"\\u[dD]", answer.body):  # half of a surrogate pair can be written in JSON
        return [[document.well_formed() for document in documents] for documents in found]
    return found


def _document(answer: Answer) -> Document:
    """The document of an answer to `/document`; raises Garbled."""
    try:
        return Document.from_mapping(_object(answer)["document"]).well_formed()
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(answer, repr(error)) from error


def _object(answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer; raises Garbled."""
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise _outside_contract(answer, str(error)) from error
    if not isinstance(found, dict):
        raise _outside_contract(answer, f"{type(found).__name__}, not an object")
    return found


def _outside_contract(answer: Answer, reason: str) -> Garbled:
    return Garbled(
        f"answered outside the wire contract ({reason}): got {answer.excerpt(200)!r}; expected "
        '{"result": [[{"document": {"id", "contents", ...}, "score"}]]}; fix: the url'
    )
