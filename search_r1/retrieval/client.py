"""Asynchronous client of `POST /retrieve`: pooled connections, merged requests, typed errors.

Searches that coroutines of one event loop start within a few milliseconds share a request, in which
each distinct query appears once. Prefetches, whose results may never be needed, have separate
requests. Retries and fail-over are in `transport`; retries are counted in a context variable, since
a request serves many tasks.
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

from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.retrieval.protocol import EmptyRetrieval, InMemoryRetrieval, Retrieval
from search_r1.retrieval.schema import TOKEN_VARIABLE, Document, from_wire, well_formed
from search_r1.retrieval.transport import (
    InvalidResponse,
    Response,
    RetryPolicy,
    Servers,
    Transport,
    read_urls,
)
from search_r1.retrying import Backoff
from verl.errors import redact

__all__ = ["Document", "EmptyRetrieval", "InMemoryRetrieval", "Retrieval", "RetrievalClient"]

T = TypeVar("T")

RETRIED = "searches_retried"
"""Name of the count of searches that needed more than one attempt, successful or not."""
NOT_FOUND = 404
REQUEST_LEVEL_STATUSES = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 421})
"""Statuses that refuse a request as a whole, which no single query can have caused."""
MAX_REQUESTS = 132
"""Maximum number of connections."""
DEAD_PEER_S = 10
"""Seconds without a packet from the peer's machine after which a connection is closed."""

_counts: ContextVar[Counter[str] | None] = ContextVar("counts", default=None)


@contextmanager
def count_retries() -> Iterator[Counter[str]]:
    """Count, under the key RETRIED, the searches awaited in the body that needed a retry."""
    counts = Counter({RETRIED: 0})
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


SearchResult = tuple[list[Document], int]
"""The documents of one search, and the number of failed attempts before."""
Futures = list[asyncio.Future[SearchResult]]


@dataclass
class _LoopState:
    """The connections of an event loop, the searches that wait to be sent, and its requests."""

    http: aiohttp.ClientSession
    waiting: dict[str, Futures] = field(default_factory=dict)
    """The searches that will share the next request, by query."""
    deadline: float = math.inf
    """The earliest deadline of these searches (`time.monotonic`)."""
    timer: asyncio.TimerHandle | None = None
    """Sends them at the end of the merge window."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests in progress."""

    def __del__(self) -> None:
        """Close the connections of a client that nobody closed: aiohttp would log two errors."""
        connector = self.http.connector
        if connector is not None:
            self.http.detach()
            next(connector.close().__await__(), None)


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
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline {deadline}; expected more than 0 seconds, or None")
        self._urls = read_urls(url)
        delays = Backoff(backoff, max_backoff, max_retry_after)
        self._policy = RetryPolicy(timeout, max_retries, delays, log_level)
        self._topk = topk
        self._deadline = math.inf if deadline is None else deadline
        self._max_batch = max_batch
        self._merge_window = merge_window
        self._token = _check_token(os.environ.get(TOKEN_VARIABLE) if token is None else token)
        with_user = [u for u in self._urls if urllib.parse.urlsplit(u).username is not None]
        if with_user and self._token is not None:
            raise ValueError(
                f"retriever url {redact(with_user[0])} with a user, and {TOKEN_VARIABLE} is set; "
                "expected only one of them, since both use the Authorization header"
            )
        self._connect()

    def __repr__(self) -> str:
        return f"RetrievalClient({redact(','.join(self._urls))!r}, topk={self._topk})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the connections, for pickling."""
        return {k: v for k, v in vars(self).items() if k not in ("_states", "_transport")}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        vars(self).update(settings)
        self._connect()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base addresses of the servers in this process's order of preference."""
        return self._transport.servers.urls

    async def search(self, query: str) -> list[Document]:
        """Return the documents for one query, best first.

        Raises RetrieverUnavailable or RetrieverRefused.
        """
        num_retries = 0
        try:
            documents, num_retries = await self._enqueue(query)
        except RetrieverUnavailable as error:
            num_retries = error.num_retries
            raise
        finally:
            if (counts := _counts.get()) is not None:
                counts[RETRIED] += int(num_retries > 0)
        return documents

    async def _enqueue(self, query: str) -> SearchResult:
        loop, state = asyncio.get_running_loop(), self._state()
        future: asyncio.Future[SearchResult] = loop.create_future()
        state.deadline = min(state.deadline, time.monotonic() + self._deadline)
        state.waiting.setdefault(well_formed(query), []).append(future)
        if len(state.waiting) >= self._max_batch:
            self._send(state)
        elif state.timer is None:
            state.timer = loop.call_later(self._merge_window, self._send, state)
        return await future

    async def health(self) -> dict[str, Any]:
        """Return the first response to `/health`; asks each server at most once."""
        return await self._get("/health", _parse_object)

    async def info(self) -> dict[str, Any]:
        """Return the first response to `/info`; asks each server at most once."""
        return await self._get("/info", _parse_object)

    async def document(self, id: str) -> Document | None:
        """Return the document with this id, or None; raises the same errors as `search`."""
        path = f"/document?{urllib.parse.urlencode({'id': well_formed(id)})}"
        try:
            return await self._get(path, _parse_document, retry=True)
        except RetrieverRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _get(self, path: str, parse: Callable[[Response], T], retry: bool = False) -> T:
        """Return the parsed response to a GET; without retries, each server is asked once."""
        transport, deadline = self._transport, time.monotonic() + self._deadline
        max_retries = None if retry else len(transport.servers) - 1
        result, _ = await transport.exchange(
            self._state().http, "GET", path, parse=parse, max_retries=max_retries, deadline=deadline
        )
        return result

    async def aclose(self) -> None:
        """Finish this event loop's searches and close its connections."""
        state = self._states.pop(asyncio.get_running_loop(), None)
        if state is None:
            return
        self._send(state)
        await asyncio.gather(*state.tasks)
        await state.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _connect(self) -> None:
        """Create what cannot be pickled: the servers' order and health, and the connections."""
        self._transport = Transport(Servers(self._urls), self._policy)
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = (
            weakref.WeakKeyDictionary()
        )

    def _state(self) -> _LoopState:
        """Return the running event loop's connections.

        They ignore proxies of the environment, which would see the token and every query.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._states:
            headers = {}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
            connector = aiohttp.TCPConnector(limit=MAX_REQUESTS, socket_factory=_open_socket)
            self._states[loop] = _LoopState(
                aiohttp.ClientSession(connector=connector, headers=headers)
            )
        return self._states[loop]

    def _send(self, state: _LoopState) -> None:
        """Send the waiting queries, except those whose searches were all cancelled."""
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        by_query = {q: fs for q, fs in state.waiting.items() if not all(f.done() for f in fs)}
        deadline, state.waiting, state.deadline = state.deadline, {}, math.inf
        if by_query:
            task = asyncio.ensure_future(self._request(state.http, deadline, by_query))
            state.tasks.add(task)
            task.add_done_callback(state.tasks.discard)

    async def _request(
        self, http: aiohttp.ClientSession, deadline: float, by_query: Mapping[str, Futures]
    ) -> None:
        """Send one request, or one for each query if it is refused, and complete all futures."""
        # With scores, since the original Search-R1 server fails without them.
        body = {"queries": list(by_query), "topk": self._topk, "return_scores": True}
        all_futures = [future for futures in by_query.values() for future in futures]
        parse = partial(_parse_documents, len(by_query))
        try:
            results, num_retries = await self._transport.exchange(
                http, "POST", "/retrieve", body, parse=parse, deadline=deadline
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
                await asyncio.gather(*(self._request(http, deadline, part) for part in parts))
            for future in all_futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in all_futures:  # without effect on those that are done
                future.cancel()


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Create a socket whose connection breaks DEAD_PEER_S after its peer has disappeared."""
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_PEER_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_PEER_S // 2)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_PEER_S // 2)
    return opened


def _check_token(text: str | None) -> SecretStr | None:
    """Return the bearer token, None if it is empty; raises ValueError if no header can hold it."""
    if not text:
        return None
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(
            "the retriever's token (not shown) has spaces or characters that a header cannot hold; "
            f"expected printable ASCII: correct {TOKEN_VARIABLE}"
        )
    return SecretStr(text)


def _parse_documents(num_queries: int, response: Response) -> list[list[Document]]:
    parsed = _parse_object(response)
    try:
        if not all(isinstance(documents, list) for documents in parsed["result"]):
            raise TypeError("a result that is not a list of documents")
        results = from_wire(parsed)
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(response, repr(error)) from error
    if len(results) != num_queries:
        raise _outside_contract(response, f"{len(results)} results for {num_queries} queries")
    if re.search(rb"\\u[dD]", response.body):  # JSON can escape half of a surrogate pair
        return [[document.well_formed() for document in documents] for documents in results]
    return results


def _parse_document(response: Response) -> Document:
    try:
        return Document.from_mapping(_parse_object(response)["document"]).well_formed()
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(response, repr(error)) from error


def _parse_object(response: Response) -> dict[str, Any]:
    try:
        parsed = json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise _outside_contract(response, str(error)) from error
    if not isinstance(parsed, dict):
        raise _outside_contract(response, f"{type(parsed).__name__}, not an object")
    return parsed


def _outside_contract(response: Response, reason: str) -> InvalidResponse:
    return InvalidResponse(
        f"answered outside the wire contract ({reason}): got {response.excerpt(200)!r}; expected "
        '{"result": [[{"document": {"id", "contents", ...}, "score"}]]}; fix: the url'
    )
