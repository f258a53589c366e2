"""Which HTTP status an error has, and which of them another attempt may cure."""

import math
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from search_r1.search.errors import (
    DeadlineExceeded,
    Overloaded,
    QueryNotRecorded,
    SearchError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.search.server.config import TOKEN_VARIABLE

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
UPSTREAM_RETRY_S = 5.0


class Problem(BaseModel):
    """What is wrong: a sentence, or for 422 a list of places and messages."""

    detail: str | list[dict[str, Any]]


def http_error(error: SearchError) -> HTTPException:
    """The answer to a request that met `error`."""
    text = printable(str(error))
    match error:
        case Overloaded():
            return _later(text, error.retry_after)
        case UpstreamInvalid():
            return HTTPException(502, text)
        case UpstreamUnavailable():
            return _later(text, UPSTREAM_RETRY_S)
        case UpstreamRefused() | QueryNotRecorded():
            return HTTPException(424, text)
        case DeadlineExceeded():
            return HTTPException(504, text)
        case _:
            return HTTPException(500, text)


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


def printable(text: str) -> str:
    """`text` without lone surrogates, which cannot be written as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _later(text: str, seconds: float) -> HTTPException:
    return HTTPException(503, text, {"Retry-After": str(max(1, math.ceil(seconds)))})
