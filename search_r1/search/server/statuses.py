"""Which HTTP status an error has, and which of them another attempt may cure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from search_r1.search.errors import (
    DeadlineExceeded,
    Overloaded,
    QueryNotRecorded,
    SearchError,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.search.server.admission import Refused, TooLarge, whole_seconds

STATUSES = {
    401: "the bearer token is missing or wrong",
    413: "the body has more bytes than are allowed",
    422: "the request is not of this form, or beyond a limit; `detail` says where and what is "
    "allowed",
    424: "an online service refused for good (a wrong key, a spent quota), or a replay has no "
    "record of a query; retrying is useless",
    500: "the search failed; `detail` says why (for example a malformed corpus row)",
    503: "the queue is full, the server is stopping, or an online service is away: ask again "
    "after `Retry-After` seconds",
    504: "no answer within the request's `deadline_s` or the server's --deadline",
}
"""Every error status of `POST /retrieve`. 424 is no 5xx, so that no client retries it."""
UPSTREAM_RETRY_S = 5


@dataclass(frozen=True)
class Failure:
    """An error as it is answered."""

    status: int
    detail: Any
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """JSON with the field `detail`."""
        return orjson.dumps({"detail": self.detail})


def failure_of(error: SearchError | TooLarge | Refused, max_body_bytes: int) -> Failure:
    """The answer to a request that met `error`."""
    match error:
        case TooLarge():
            detail = f"the body is too large; at most {max_body_bytes} bytes are allowed"
            return Failure(413, detail, {"Connection": "close"})
        case Refused():
            return Failure(422, error.detail)
        case Overloaded():
            return _later(error, whole_seconds(error.retry_after))
        case UpstreamUnavailable():
            return _later(error, UPSTREAM_RETRY_S)
        case UpstreamRefused() | QueryNotRecorded():
            return Failure(424, _text(error))
        case DeadlineExceeded():
            return Failure(504, _text(error))
        case _:
            return Failure(500, _text(error))


def _later(error: SearchError, seconds: int) -> Failure:
    return Failure(503, _text(error), {"Retry-After": str(seconds)})


def _text(error: Exception) -> str:
    return str(error).encode("utf-8", "replace").decode()
