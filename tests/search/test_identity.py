"""Fingerprints identify a retriever's corpus, its index with the backend, and its encoder."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from search_r1.agent.search import retriever_identity
from search_r1.search.server.app import create_app
from tests.search.server.fake_backends import FakeBackend

FACTS = {"engine": "flat", "index": "i1", "corpus": {"sha256": "c1"}, "encoder": {"model": "e1"}}


def test_each_part_has_a_fingerprint_of_its_own(serve: Callable[..., Any]) -> None:
    """Another corpus, index or encoder changes only its fingerprint; server limits change none."""
    backend = FakeBackend()

    def identity(**facts: Any) -> dict[str, str]:
        backend.facts = {**FACTS, **facts}
        with serve(create_app(backend)) as url:
            return retriever_identity(f"{url}/retrieve", timeout=30.0)

    first = identity()
    assert set(first) == {"corpus", "index", "encoder"}
    changes: dict[str, dict[str, Any]] = {
        "corpus": {"corpus": {"sha256": "c2"}},
        "index": {"index": "i2"},
        "encoder": {"encoder": {"model": "e2"}},
    }
    for name, facts in changes.items():
        second = identity(**facts)
        assert {key for key in first if first[key] != second[key]} == {name}
    backend.num_documents += 1
    assert identity() == first


def test_a_server_without_info_has_no_fingerprints(serve: Callable[..., Any]) -> None:
    """The original server, or no server, gives no fingerprints and no error."""
    with serve(FastAPI()) as url:
        assert retriever_identity(f"{url}/retrieve", timeout=30.0) == {}
    assert retriever_identity(f"{url}/retrieve", timeout=5.0) == {}
