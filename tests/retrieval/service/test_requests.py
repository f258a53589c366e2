"""The parsing of bodies: what happens to fields that a request does not have, at every size."""

import json

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from search_r1.retrieval.service.requests import MAX_SLOW_BYTES, parse


class Open(BaseModel):
    """A request that keeps unknown fields, to find misspelt ones."""

    model_config = ConfigDict(extra="allow")
    text: str


class Closed(BaseModel):
    """A request that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")
    text: str


def body(length: int) -> bytes:
    return json.dumps({"text": "x" * length, "txet": [[]]}).encode()


def test_unknown_fields_are_kept_in_small_bodies_only() -> None:
    """Their values could be millions of lists."""
    assert parse(body(1), Open).model_extra == {"txet": [[]]}
    large = parse(body(MAX_SLOW_BYTES), Open)
    assert len(large.text) == MAX_SLOW_BYTES and not large.model_extra


@pytest.mark.parametrize("length", [1, MAX_SLOW_BYTES])
def test_a_request_that_refuses_them_refuses_them_at_every_size(length: int) -> None:
    """A misspelt field is never ignored there."""
    with pytest.raises(HTTPException) as caught:
        parse(body(length), Closed)
    assert caught.value.status_code == 422 and "txet" in str(caught.value.detail)
