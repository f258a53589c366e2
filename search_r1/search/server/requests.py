"""Requests to `/retrieve`: their bodies read within a size and a time, and checked by limits."""

import asyncio
import json
import re
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from search_r1.search.errors import DeadlineExceeded
from search_r1.search.schema import RetrieveRequest, well_formed
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.http_errors import printable

READ_ON = 4
"""Times the largest body that is read all the same, so that a client reads our 413."""
MAX_PARTS = 250_000
"""Lists, objects and fields in a body: parsed in 0.2 s, while 8 MB of them take 3 s and 1 GB."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text in JSON; one without an end reaches to the end of the body, so that none is read twice."""
Model = TypeVar("Model", bound=BaseModel)


def limited(config: ServiceConfig) -> type[RetrieveRequest]:
    """The wire contract's request with the limits of this server."""
    fields = RetrieveRequest.model_fields

    class Limited(RetrieveRequest):
        model_config = ConfigDict(title="RetrieveRequest")

        queries: list[
            Annotated[str, BeforeValidator(_mend), Field(max_length=config.max_query_chars)]
        ] = Field(
            max_length=config.max_queries,
            fail_fast=True,  # or each of a million wrong queries is an error of its own
            description=fields["queries"].description,
        )
        topk: Annotated[int, Field(ge=1, le=config.max_topk)] | None = Field(
            default=None, description=fields["topk"].description
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
    return {"loc": ["body", *place], "msg": printable(message), "type": kind}


def _mend(value: Any) -> Any:
    return well_formed(value) if isinstance(value, str) else value
