"""Fingerprints identify a retriever's corpus, its index with the backend, and its encoder."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from search_r1.agent.retriever import ServedSearch
from search_r1.retrieval.service.app import create_app
from tests.retrieval.service.fake_backends import FakeBackend
from verl.config.agent import ServerConfig

FACTS = {"engine": "flat", "index": "i1", "corpus": {"sha256": "c1"}, "encoder": {"model": "e1"}}


def read_identity(url: str, timeout: float = 30.0) -> Mapping[str, str]:
    """Return the fingerprints that the search tool fetches from a server."""
    options = ServerConfig(url=f"{url}/retrieve", timeout=timeout)
    return ServedSearch(options).identity()


def test_each_part_has_a_fingerprint_of_its_own(serve: Callable[..., Any]) -> None:
    """Another corpus, index or encoder changes only its fingerprint; server limits change none."""
    backend = FakeBackend()

    def identity(**facts: Any) -> Mapping[str, str]:
        backend.facts = {**FACTS, **facts}
        with serve(create_app(backend)) as url:
            return read_identity(url)

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
        assert read_identity(url) == {}
    assert read_identity(url, timeout=5.0) == {}
