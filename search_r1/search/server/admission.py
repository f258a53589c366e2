"""What is let in: bodies, queries and topk within the limits, and no more than the queue holds."""

import asyncio
import json
import math
from typing import Any

from pydantic import ValidationError
from starlette.types import Receive, Scope

from search_r1.search.errors import DeadlineExceeded, Overloaded
from search_r1.search.schema import RetrieveRequest
from search_r1.search.server.config import ServiceConfig

SMOOTHING = 0.2
LONGEST_RETRY_S = 60.0
READ_ON = 4
"""Times the largest body that is read, and thrown away, so that a client reads our 413."""


class Gate:
    """Bounds the queue, and estimates from the measured rate when it will have room."""

    def __init__(self, max_pending: int, num_threads: int) -> None:
        """`num_threads` searches at once."""
        self._max_pending = max_pending
        self._num_threads = num_threads
        self._rate = 0.0

    def measured(self, num_queries: int, seconds: float) -> None:
        """Learn from a batch how many queries a second are answered."""
        rate = self._num_threads * num_queries / max(seconds, 1e-6)
        self._rate += (SMOOTHING if self._rate else 1.0) * (rate - self._rate)

    def admit(self, num_new: int, num_pending: int) -> None:
        """Raise Overloaded if `num_new` queries more than `num_pending` are too many."""
        excess = num_pending + num_new - self._max_pending
        if num_new and excess > 0:
            raise Overloaded(
                f"{num_pending} queries are waiting and {num_new} more were asked, "
                f"{self._max_pending} may wait: ask again later",
                self._until(excess),
            )

    def _until(self, num_queries: int) -> float:
        """Seconds until so many are answered, at least 1 and at most 60."""
        seconds = num_queries / self._rate if self._rate else 1.0
        return min(LONGEST_RETRY_S, max(1.0, seconds))


class TooLarge(Exception):
    """The body has more bytes than are allowed."""


class Refused(Exception):
    """The request is not of the contract's form or beyond its limits; `detail` says where."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        super().__init__(str(detail))
        self.detail = detail


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(scope: Scope, receive: Receive, config: ServiceConfig) -> bytes:
    """The body; raises TooLarge, ClientGone, or DeadlineExceeded for one that does not arrive."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > READ_ON * config.max_body_bytes:
            raise TooLarge
    message = await receive()  # a small body is here already
    if message["type"] == "http.request" and not message.get("more_body", False):
        chunks, size = [message.get("body", b"")], len(message.get("body", b""))
    else:
        try:
            async with asyncio.timeout(config.deadline):
                chunks, size = await _read_on(message, receive, config.max_body_bytes)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the body did not arrive within {config.deadline:g} s"
            ) from error
    if size > config.max_body_bytes:
        raise TooLarge
    return b"".join(chunks)


async def _read_on(message: Any, receive: Receive, limit: int) -> tuple[list[bytes], int]:
    """Chunks and size of the body; beyond the limit chunks are only counted, up to 4 * limit."""
    chunks, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        if not message.get("more_body", False) or size > READ_ON * limit:
            return chunks, size
        message = await receive()


def parse(body: bytes, config: ServiceConfig) -> RetrieveRequest:
    """The request; raises Refused for one outside the contract or the limits."""
    try:
        request = _validate(body)
    except ValidationError as error:
        raise Refused([_detail(e["loc"], e["msg"], e["type"]) for e in error.errors()]) from error
    except (ValueError, RecursionError) as error:
        raise Refused([_detail((), f"the body is no JSON: {error}", "json_invalid")]) from error
    _check_limits(request, config)
    return request


def _validate(body: bytes) -> RetrieveRequest:
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        if error.errors()[0]["type"] != "json_invalid":
            raise
    return RetrieveRequest.model_validate(json.loads(body))  # takes lone surrogates


def _check_limits(request: RetrieveRequest, config: ServiceConfig) -> None:
    """Raise Refused that names what is allowed."""
    if len(request.queries) > config.max_queries:
        got = f"{len(request.queries)} queries; at most {config.max_queries} are allowed"
        raise Refused([_detail(("queries",), got, "too_long")])
    for i, query in enumerate(request.queries):
        if len(query) > config.max_query_chars:
            got = f"{len(query)} characters; at most {config.max_query_chars} are allowed"
            raise Refused([_detail(("queries", i), got, "string_too_long")])
    if request.topk is not None and request.topk > config.max_topk:
        got = f"topk {request.topk}; at most {config.max_topk} is allowed"
        raise Refused([_detail(("topk",), got, "less_than_equal")])


def _detail(place: tuple[Any, ...], message: str, kind: str) -> dict[str, Any]:
    """One mistake, without the input: it may not even be valid Unicode."""
    text = message.encode("utf-8", "replace").decode()
    return {"loc": ["body", *place], "msg": text, "type": kind}


def whole_seconds(seconds: float) -> int:
    """The value of a Retry-After header."""
    return max(1, math.ceil(seconds))
