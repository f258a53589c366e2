"""What the retriever says of itself, and what is made of it."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from search_r1.inference.opening import facts_of
from verl.config import Config
from verl.errors import ConfigError, ToolError

FACTS = {"retriever": "bm25", "corpus": {"count": 2, "digest": "ab"}}


@contextlib.contextmanager
def serving(answer: Any, status: int = 200) -> Iterator[str]:
    """A server that answers /info so; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def facts(*urls: str) -> dict[str, Any]:
    config = Config()
    config.retriever.url = ",".join(urls)
    return dict(asyncio.run(facts_of(config)))


def test_allowances_are_no_part_of_what_is_searched() -> None:
    """Two servers of one index may differ in their limits, not in their corpus."""
    with serving(FACTS | {"limits": {"a": 1}}) as one, serving(FACTS | {"limits": {"a": 2}}) as two:
        assert facts(one, two) == FACTS
    with (
        serving(FACTS) as one,
        serving(FACTS | {"corpus": {"count": 3}}) as two,
        pytest.raises(ToolError, match="same corpus"),
    ):
        facts(one, two)


def test_a_server_of_another_make_is_known_by_its_address_alone() -> None:
    """Without /info nothing is claimed of its corpus; without a token there is a message."""
    with serving({}, 404) as url:
        assert facts(url) == {"retriever": "unknown", "address": url}
    with serving({}, 401) as url, pytest.raises(ToolError, match="RETRIEVER_TOKEN"):
        facts(url)


def test_settings_that_reach_no_server_are_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address that is none, a token for no header, two logins: told, without the password."""
    with pytest.raises(ConfigError, match="'ftp://a'; expected http://"):
        facts("ftp://a")
    monkeypatch.setenv("RETRIEVER_TOKEN", "two words")
    with pytest.raises(ConfigError, match="correct RETRIEVER_TOKEN"):
        facts("http://127.0.0.1:1")
    monkeypatch.setenv("RETRIEVER_TOKEN", "word")
    with pytest.raises(ConfigError, match="with a user") as caught:
        facts("http://ann:hush@127.0.0.1:1")
    assert "hush" not in f"{caught.value}{caught.value.__cause__}"


def test_no_documents_need_no_server() -> None:
    """`empty` is a retriever by itself."""
    assert facts("empty") == {"retriever": "empty"}
