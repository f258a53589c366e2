"""Requests to `/retrieve`, read within a size and a time, checked by limits; and their errors."""

import asyncio
import json
import math
import re
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from search_r1.search.errors import (
    DeadlineExceeded,
    Overloaded,
    QueryNotRecorded,
    SearchError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.search.schema import TOKEN_VARIABLE, well_formed
from search_r1.search.settings import ServiceConfig

STATUSES = {
    401: "the bearer token is missing or wrong",
    413: "the body has more bytes than are allowed",
    421: "`Host` is a name that the server was not given with --allowed_hosts",
    422: "the request is not of this form, or beyond a limit; `detail` says where and what is "
    "allowed",
    424: "an online service refused for good (a wrong key, a spent quota), or a replay has no "
    "record of a query; retrying is useless",
    500: "the search failed; `detail` says why (for example a malformed corpus row)",
    502: "an online service answers, but not in its documented form",
    503: "the queue is full, the server is stopping, or an online service is away: ask again "
    "after `Retry-After` seconds",
    504: "no answer within the request's `deadline_s` or the server's --deadline",
}
"""Every error status of `POST /retrieve`. 424 is no 5xx, so that no client retries it."""
STATUS_OF: tuple[tuple[type[SearchError], int], ...] = (
    (Overloaded, 503),
    (UpstreamInvalid, 502),
    (UpstreamUnavailable, 503),
    (UpstreamRefused, 424),
    (QueryNotRecorded, 424),
    (DeadlineExceeded, 504),
)
"""The first that an error is counts; all others are 500."""
UPSTREAM_RETRY_S = 5.0
READ_ON = 4
"""Times the largest body that is read all the same, so that a client reads our 413."""
MAX_PARTS = 250_000
"""Lists, objects and fields in a body: parsed in 0.2 s, while 8 MB of them take 3 s and 1 GB."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text in JSON; one without an end reaches to the end of the body, so that none is read twice."""
Model = TypeVar("Model", bound=BaseModel)


class Problem(BaseModel):
    """What is wrong: a sentence, or for 422 a list of places and messages."""

    detail: str | list[dict[str, Any]]


def http_error(error: SearchError) -> HTTPException:
    """The answer to a request that met `error`."""
    status = next((status for kind, status in STATUS_OF if isinstance(error, kind)), 500)
    seconds = max(1, math.ceil(getattr(error, "retry_after", UPSTREAM_RETRY_S)))
    headers = {"Retry-After": str(seconds)} if status == 503 else None
    return HTTPException(status, well_formed(str(error)), headers)


def as_response(error: HTTPException) -> JSONResponse:
    """The error as FastAPI writes it."""
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def misdirected(text: str) -> JSONResponse:
    """The answer to a request for a name that is not this server's."""
    return as_response(HTTPException(421, text))


def without_token() -> HTTPException:
    """The answer to a request that needs the token and does not carry it."""
    text = (
        "a bearer token is needed: send `Authorization: Bearer TOKEN` with the value that the "
        f"server has in its environment variable {TOKEN_VARIABLE}"
    )
    return HTTPException(401, text, {"WWW-Authenticate": "Bearer"})


class RetrieveRequest(BaseModel):
    """The body of `POST /retrieve`; an empty list of queries has an empty result."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = Field(default=False, description="Wrap each document with its score.")
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds to wait for the answer, at most the server's --deadline; then 504.",
    )


def limited(config: ServiceConfig) -> type[RetrieveRequest]:
    """The wire contract's request with the limits of this server."""

    def mended(value: Any) -> Any:
        return well_formed(value) if isinstance(value, str) else value

    class Limited(RetrieveRequest):
        model_config = ConfigDict(title="RetrieveRequest")

        queries: list[
            Annotated[str, BeforeValidator(mended), Field(max_length=config.max_query_chars)]
        ] = Field(
            max_length=config.max_queries,
            fail_fast=True,  # or each of a million wrong queries is an error of its own
            description="Questions, each searched on its own.",
        )
        topk: Annotated[int, Field(ge=1, le=config.max_topk)] | None = Field(
            default=None, description="Documents per query; null means the server's --topk."
        )

    return Limited


async def read_body(receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """The body; raises a 413, ClientDisconnect, or DeadlineExceeded for one that never ends."""
    message = await receive()
    body = bytearray(message.get("body", b""))
    if message.get("more_body", False) or message["type"] == "http.disconnect":
        try:
            async with asyncio.timeout(seconds):
                await _read_on(message, receive, body, READ_ON * max_bytes)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the body did not arrive within {seconds:g} s") from error
    if len(body) > max_bytes:
        text = f"the body is too large; at most {max_bytes} bytes are allowed"
        raise HTTPException(413, text, {"Connection": "close"})
    return bytes(body)


async def _read_on(message: Message, receive: Receive, body: bytearray, most: int) -> None:
    """Add what follows `message` to `body`, until it has more than `most` bytes."""
    while message.get("more_body", False) and len(body) <= most:
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        raise ClientDisconnect


def parse(body: bytes, model: type[Model]) -> Model:
    """The request; raises a 422 for one outside the contract or the limits."""
    try:
        if has_too_many(body):
            raise ValueError(f"it has more than {MAX_PARTS} lists, objects and fields")
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            if _faults(error)[0]["type"] != "json_invalid":
                raise
        return model.model_validate(json.loads(body))  # takes lone surrogates
    except ValidationError as error:
        details = [_detail(e["loc"], e["msg"], e["type"]) for e in _faults(error)]
        raise HTTPException(422, details) from error
    except (ValueError, RecursionError) as error:
        details = [_detail((), f"the body cannot be read as JSON: {error}", "json_invalid")]
        raise HTTPException(422, details) from error


def has_too_many(body: bytes) -> bool:
    """Whether JSON has more lists, objects and fields than MAX_PARTS; texts have none."""

    def is_above(text: bytes) -> bool:
        return sum(map(text.count, (b"[", b"{", b":"))) > MAX_PARTS

    return len(body) > MAX_PARTS and is_above(body) and is_above(STRING.sub(b"", body))


def _faults(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def _detail(place: tuple[Any, ...], message: str, kind: str) -> dict[str, Any]:
    """One mistake, without the input: it may not even be valid Unicode."""
    return {"loc": ["body", *place], "msg": well_formed(message), "type": kind}
