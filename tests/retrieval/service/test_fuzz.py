"""Requests generated from our OpenAPI: responses conform to it, without 500 and without hangs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.retrieval.service.fake_backends import client

CHECKS = [
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
BOUNDED = settings(
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CONFIG = ServiceConfig(max_query_chars=200, max_queries=20, batch_wait_ms=0, deadline=20.0)


@pytest.fixture(scope="module")
def app(open_engine: Callable[[str], Retriever]) -> Any:
    """A server with BM25 over the small corpus."""
    return create_app(open_engine("bm25"), CONFIG)


CASES = [
    ("POST", "/retrieve", GenerationMode.POSITIVE),
    ("POST", "/retrieve", GenerationMode.NEGATIVE),
    ("GET", "/health", GenerationMode.POSITIVE),
    ("GET", "/info", GenerationMode.POSITIVE),
    ("GET", "/metrics", GenerationMode.POSITIVE),
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_requests_of_our_openapi(app: Any, method: str, path: str, mode: GenerationMode) -> None:
    """Valid and invalid requests get a status and body as in the OpenAPI, never 500."""
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]
    statuses: set[int] = set()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(timeout=20)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code != 500
        statuses.add(answer.status_code)

    check()
    assert (200 if mode is GenerationMode.POSITIVE else 422) in statuses


BYTES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode()),
    st.just(b"[" * 100_000),
    st.just(b'{"queries": ["a"], "topk": ' + b"9" * 10_000 + b"}"),
)


@settings(BOUNDED)
@given(body=BYTES)
def test_any_bytes(app: Any, body: bytes) -> None:
    """Any body gets 200, or 422 with the location of the error."""

    async def main() -> None:
        async with client(app) as http:
            answer = await http.post("/retrieve", content=body)
        assert answer.status_code == 200 or answer.json()["detail"][0]["loc"][0] == "body"
        assert answer.status_code in (200, 422)

    asyncio.run(main())
