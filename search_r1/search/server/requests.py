"""Requests to `/retrieve`: their bodies read within a size and a time, and checked by limits."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import HTTPException
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from search_r1.search.errors import DeadlineExceeded
from search_r1.search.schema import RetrieveRequest, well_formed
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.http_errors import printable

READ_ON = 4
"""Times the largest body that is read all the same, so that a client reads our 413."""


def limited(config: ServiceConfig) -> type[RetrieveRequest]:
    """The wire contract's request with the limits of this server."""
    fields = RetrieveRequest.model_fields

    class Limited(RetrieveRequest):
        model_config = ConfigDict(title="RetrieveRequest")

        queries: list[
            Annotated[str, BeforeValidator(_mend), Field(max_length=config.max_query_chars)]
        ] = Field(max_length=config.max_queries, description=fields["queries"].description)
        topk: Annotated[int, Field(ge=1, le=config.max_topk)] | None = Field(
            default=None, description=fields["topk"].description
        )

    return Limited


async def read_body(receive: Receive, config: ServiceConfig) -> bytes:
    """The body; raises a 413, ClientDisconnect, or DeadlineExceeded for one that never ends."""
    message = await receive()
    body = bytearray(message.get("body", b""))
    if message.get("more_body", False) or message["type"] == "http.disconnect":
        try:
            async with asyncio.timeout(config.deadline):
                await _read_on(message, receive, body, READ_ON * config.max_body_bytes)
        except TimeoutError as error:
            text = f"the body did not arrive within {config.deadline:g} s"
            raise DeadlineExceeded(text) from error
    if len(body) > config.max_body_bytes:
        text = f"the body is too large; at most {config.max_body_bytes} bytes are allowed"
        raise HTTPException(413, text, {"Connection": "close"})
    return bytes(body)


async def _read_on(message: Message, receive: Receive, body: bytearray, most: int) -> None:
    """Add what follows `message` to `body`, until it has more than `most` bytes."""
    while message.get("more_body", False) and len(body) <= most:
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        raise ClientDisconnect


def parse(body: bytes, model: type[RetrieveRequest]) -> RetrieveRequest:
    """The request; raises a 422 for one outside the contract or the limits."""
    try:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise
        return model.model_validate(json.loads(body))  # takes lone surrogates
    except ValidationError as error:
        details = [_detail(e["loc"], e["msg"], e["type"]) for e in error.errors()]
        raise HTTPException(422, details) from error
    except (ValueError, RecursionError) as error:
        details = [_detail((), f"the body is no JSON: {error}", "json_invalid")]
        raise HTTPException(422, details) from error


def _detail(place: tuple[Any, ...], message: str, kind: str) -> dict[str, Any]:
    """One mistake, without the input: it may not even be valid Unicode."""
    return {"loc": ["body", *place], "msg": printable(message), "type": kind}


def _mend(value: Any) -> Any:
    return well_formed(value) if isinstance(value, str) else value
