"""The asynchronous client of `/retrieve`: pooled, merging, retrying, with typed errors.

Searches that coroutines of one event loop start within a few milliseconds travel in one request.
"""

import asyncio
import logging
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable, SearchError
from search_r1.search.retrieval import EmptyRetrieval, InMemoryRetrieval, Retrieval
from search_r1.search.schema import Document, from_wire, well_formed

__all__ = ["Document", "EmptyRetrieval", "InMemoryRetrieval", "Retrieval", "RetrievalClient"]

logger = logging.getLogger(__name__)

Waiter = tuple[str, asyncio.Future[list[Document]]]


@dataclass
class _LoopState:
    """What belongs to one event loop: its connections and the searches not yet sent."""

    http: httpx.AsyncClient
    waiting: list[Waiter] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class RetrievalClient:
    """A `Retrieval` over HTTP; usable from any event loop, connections are made when needed.

    `async with` closes the connections of the loop it runs in, as `aclose` does.
    """

    def __init__(
        self,
        url: str,
        topk: int | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 5,
        backoff: float = 0.25,
        max_backoff: float = 8.0,
        max_batch: int = 256,
        merge_window: float = 0.003,
    ) -> None:
        """Nothing is sent yet.

        `url` is the server's base address, or ends in `/retrieve`. `topk` None leaves the number
        of documents to the server. `timeout` (s) bounds one attempt; after `max_retries` more
        attempts a search fails. The n-th pause is `backoff` * 2^n s, at most `max_backoff`, cut
        by up to a half at random. At most `max_batch` queries, started within `merge_window` s,
        share a request.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"retriever url {url!r}; expected http:// or https:// at its start, for example "
                "http://127.0.0.1:8000"
            )
        httpx.URL(url)  # raises InvalidURL, which says what is wrong
        self.url = url.rstrip("/").removesuffix("/retrieve")
        self._topk = topk
        self._timeout = timeout
        self._max_retries = max_retries
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._max_batch = max_batch
        self._merge_window = merge_window
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        """Settings only, so that a client can be sent to another process."""
        return {name: value for name, value in vars(self).items() if name != "_states"}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        """The settings of another process's client, without its connections."""
        vars(self).update(settings, _states=weakref.WeakKeyDictionary())

    async def search(self, query: str) -> list[Document]:
        """The documents for one query, best first.

        Raises RetrieverUnavailable or RetrieverRefused.
        """
        loop = asyncio.get_running_loop()
        state = self._state()
        future: asyncio.Future[list[Document]] = loop.create_future()
        state.waiting.append((query, future))
        if len(state.waiting) >= self._max_batch:
            self._send(state)
        elif state.timer is None:
            state.timer = loop.call_later(self._merge_window, self._send, state)
        return await future

    async def health(self) -> dict[str, Any]:
        """The server's `/health`, asked once; raises RetrieverUnavailable or RetrieverRefused."""
        answer = await self._attempt("GET", "/health", None)
        return dict(_json(answer))

    async def aclose(self) -> None:
        """Finish what was sent from this event loop and close its connections."""
        state = self._states.pop(asyncio.get_running_loop(), None)
        if state is None:
            return
        self._send(state)
        await asyncio.gather(*state.tasks)
        await state.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    def _state(self) -> _LoopState:
        """This event loop's connections. Proxies of the environment are not for a local server."""
        loop = asyncio.get_running_loop()
        if loop not in self._states:
            http = httpx.AsyncClient(timeout=self._timeout, trust_env=False)
            self._states[loop] = _LoopState(http)
        return self._states[loop]

    def _send(self, state: _LoopState) -> None:
        """Start one request with every search that waits."""
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        waiters, state.waiting = state.waiting, []
        if waiters:
            task = asyncio.ensure_future(self._serve(state.http, waiters))
            state.tasks.add(task)
            task.add_done_callback(state.tasks.discard)

    async def _serve(self, http: httpx.AsyncClient, waiters: Sequence[Waiter]) -> None:
        """Give every waiter its documents or the error; a refused batch is asked one by one.

        Whatever else happens, no waiter is left waiting: cancelling a finished one has no effect.
        """
        try:
            found = await self._retrieve(http, [query for query, _ in waiters])
        except RetrieverRefused as error:
            if len(waiters) > 1:
                await asyncio.gather(*(self._serve(http, [waiter]) for waiter in waiters))
            else:
                _fail(waiters, error)
        except SearchError as error:
            _fail(waiters, error)
        else:
            for (_, future), documents in zip(waiters, found, strict=True):
                if not future.done():
                    future.set_result(documents)
        finally:
            for _, future in waiters:
                future.cancel()

    async def _retrieve(self, http: httpx.AsyncClient, queries: list[str]) -> list[list[Document]]:
        """One request, tried until it is answered or the retries are spent.

        Scores are asked for because the original server fails without them.
        """
        clean = [well_formed(query) for query in queries]
        body = {"queries": clean, "topk": self._topk, "return_scores": True}
        for attempt in range(self._max_retries + 1):
            try:
                answer = await self._attempt("POST", "/retrieve", body, http)
                return _documents(answer, len(queries))
            except RetrieverUnavailable as error:
                if attempt == self._max_retries:
                    raise RetrieverUnavailable(
                        f"{error}; gave up after {attempt + 1} attempts: start the retriever "
                        "(bash retrieval_launch.sh) or correct its url"
                    ) from error
                logger.warning("%s; attempt %d of %d", error, attempt + 1, self._max_retries + 1)
                await asyncio.sleep(self._pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int) -> float:
        """Seconds before the next attempt: exponential, bounded, with jitter."""
        longest: float = min(self._max_backoff, self._backoff * 2.0**attempt)
        return longest * random.uniform(0.5, 1.0)

    async def _attempt(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        http: httpx.AsyncClient | None = None,
    ) -> httpx.Response:
        """One exchange; raises RetrieverUnavailable where another attempt may help."""
        http = http or self._state().http
        try:
            answer = await http.request(method, self.url + path, json=body)
        except httpx.RequestError as error:
            raise RetrieverUnavailable(
                f"retriever {self.url} does not answer ({type(error).__name__}: {error})"
            ) from error
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            raise RetrieverUnavailable(
                f"retriever {self.url} answers {answer.status_code}: {answer.text[:200]}"
            )
        if not answer.is_success:
            raise RetrieverRefused(
                f"retriever {self.url}{path} refused with {answer.status_code}, expected 200: "
                f"{answer.text[:500]}"
            )
        return answer


def _fail(waiters: Sequence[Waiter], error: SearchError) -> None:
    for _, future in waiters:
        if not future.done():
            future.set_exception(error)


def _documents(answer: httpx.Response, num_queries: int) -> list[list[Document]]:
    """The documents of an answer; raises RetrieverRefused if it is outside the contract."""
    try:
        found = from_wire(_json(answer))
    except (KeyError, TypeError, AttributeError) as error:
        raise _outside_contract(answer, repr(error)) from error
    if len(found) != num_queries:
        raise _outside_contract(answer, f"{len(found)} results for {num_queries} queries")
    return found


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise _outside_contract(answer, str(error)) from error


def _outside_contract(answer: httpx.Response, reason: str) -> RetrieverRefused:
    return RetrieverRefused(
        f"{answer.url} answered outside the wire contract ({reason}): got {answer.text[:200]!r}; "
        'expected {"result": [[{"document": {"id", "contents", ...}, "score"}]]}: is the url a '
        "retrieval server's?"
    )
