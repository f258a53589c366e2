"""Reads and validates requests to `/retrieve` within limits, and converts errors to responses."""

import asyncio
import json
import math
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from search_r1.retrieval.errors import (
    DeadlineExceeded,
    Overloaded,
    QueryNotRecorded,
    SearchError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.retrieval.schema import TOKEN_VARIABLE, well_formed
from search_r1.retrieval.settings import ServiceConfig

STATUSES = {
    400: "the name in `Host` is not one of --allowed_hosts",
    401: "the bearer token is missing or wrong",
    402: "what an online service may cost (--online_budget) is spent",
    413: "the body is larger than allowed",
    422: "the request is invalid or exceeds a limit; `detail` says where and what is allowed",
    424: "an online service refused (key, quota), or a replay lacks the query: do not retry",
    500: "the search failed; `detail` says why (for example a malformed corpus row)",
    502: "an online service responds, but not in its documented format",
    503: "queue full, server stopping, or online service unavailable: retry after `Retry-After` s",
    504: "no result within the request's `deadline_s` or the server's --deadline",
}
"""The error statuses of `POST /retrieve`. 424 is not a 5xx, so that clients do not retry it."""
STATUS_BY_ERROR: tuple[tuple[type[SearchError], int], ...] = (
    (Overloaded, 503),
    (UpstreamInvalid, 502),
    (UpstreamUnavailable, 503),
    (UpstreamRefused, 424),
    (QueryNotRecorded, 424),
    (DeadlineExceeded, 504),
)
"""The first matching type counts; all other errors are 500."""
UPSTREAM_RETRY_S = 5.0
"""`Retry-After` if an online service is unavailable."""
MAX_READ_FACTOR = 4
"""A body too large is read up to this multiple of the limit, so that the client gets the 413."""
MAX_SLOW_BYTES = 2**20
"""Larger bodies are read without their unknown fields, whose values could be millions of lists, and
without the repair of lone surrogates: both would make all other requests wait for seconds."""
MAX_PROBLEMS = 20
"""Number of mistakes that are told, and of the unknown fields that are compared with known ones."""
Model = TypeVar("Model", bound=BaseModel)


class Problem(BaseModel):
    """The body of an error: a sentence, or for 422 a list of locations and messages."""

    detail: str | list[dict[str, Any]]


def http_error(error: SearchError) -> HTTPException:
    """Convert an error of the search to an HTTP error."""
    default = next((status for kind, status in STATUS_BY_ERROR if isinstance(error, kind)), 500)
    status = getattr(error, "status", default)
    seconds = max(1, math.ceil(getattr(error, "retry_after", UPSTREAM_RETRY_S)))
    headers = {"Retry-After": str(seconds)} if status == 503 else None
    return HTTPException(status, well_formed(str(error)), headers)


def as_response(error: HTTPException) -> JSONResponse:
    """Return the error as a response in FastAPI's format."""
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def unauthorized() -> HTTPException:
    """Return the 401 error for a request without the bearer token."""
    text = (
        "a bearer token is needed: send `Authorization: Bearer TOKEN` with the value that the "
        f"server has in its environment variable {TOKEN_VARIABLE}"
    )
    return HTTPException(401, text, {"WWW-Authenticate": "Bearer"})


class RetrieveRequest(BaseModel):
    """The body of `POST /retrieve`; an empty list of queries gives an empty result."""

    model_config = ConfigDict(extra="allow")  # to find misspelt fields

    queries: list[str]
    topk: int | None = None
    return_scores: bool = Field(default=False, description="Return each document with its score.")
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds to wait for the result, at most the server's --deadline; then 504.",
    )
    filter: Any = Field(
        default=None, description="Values of fields, of which a hit has one: `{field: [values]}`."
    )
    filters: Any = None  # refused, unless empty


def request_model(config: ServiceConfig) -> type[RetrieveRequest]:
    """Return the request model with the limits of this server."""

    def repair(value: Any) -> Any:
        return well_formed(value) if isinstance(value, str) else value

    class Limited(RetrieveRequest):
        model_config = ConfigDict(title="RetrieveRequest", extra="allow")

        queries: list[
            Annotated[str, BeforeValidator(repair), Field(max_length=config.max_query_chars)]
        ] = Field(
            max_length=config.max_queries,
            fail_fast=True,  # otherwise a million invalid queries are a million errors
            description="Queries, each searched separately.",
        )
        topk: Annotated[int, Field(ge=1, le=config.max_topk)] | None = Field(
            default=None, description="Documents per query; null means the server's --topk."
        )

    return Limited


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Read a body; raises a 413, ClientDisconnect, or DeadlineExceeded after `seconds`."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while (message := await request.receive())["type"] != "http.disconnect":
                body += message.get("body", b"")
                if not message.get("more_body") or len(body) > MAX_READ_FACTOR * max_bytes:
                    break
            else:
                raise ClientDisconnect
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not arrive within {seconds:g} s") from error
    if len(body) > max_bytes:
        text = f"the body is too large; at most {max_bytes} bytes are allowed"
        raise HTTPException(413, text, {"Connection": "close"})
    return bytes(body)


def parse(body: bytes, model: type[Model]) -> Model:
    """Parse a request; raises a 422 if it is invalid or exceeds a limit."""
    is_large = len(body) > MAX_SLOW_BYTES
    keeps_unknown = model.model_config.get("extra") == "allow"
    try:
        try:
            extra: Literal["ignore"] | None = "ignore" if is_large and keeps_unknown else None
            return model.model_validate_json(body, extra=extra)
        except ValidationError as error:
            if is_large or _errors(error)[0]["type"] != "json_invalid":
                raise
        return model.model_validate(json.loads(body))  # accepts lone surrogates
    except ValidationError as error:
        details = [problem(e["loc"], e["msg"], e["type"]) for e in _errors(error)[:MAX_PROBLEMS]]
        raise HTTPException(422, details) from error
    except (ValueError, RecursionError) as error:
        details = [problem((), f"the body cannot be read as JSON: {error}", "json_invalid")]
        raise HTTPException(422, details) from error


def _errors(error: ValidationError) -> list[Any]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def problem(location: tuple[Any, ...], message: str, kind: str) -> dict[str, Any]:
    """Describe one mistake, without the input, which may not be valid Unicode."""
    return {"loc": ["body", *location], "msg": well_formed(message), "type": kind}
