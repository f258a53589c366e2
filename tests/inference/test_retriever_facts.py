"""Facts about the retriever from `/info`."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from search_r1.inference.retriever_facts import retriever_facts
from verl.errors import ConfigError, ToolError

FACTS = {"retriever": "bm25", "corpus": {"count": 2, "digest": "ab"}}


@contextlib.contextmanager
def serving(answer: Any, status: int = 200) -> Iterator[str]:
    """Serve this response to /info and provide the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def facts(*urls: str) -> dict[str, Any]:
    return dict(asyncio.run(retriever_facts(",".join(urls))))


def test_allowances_are_no_part_of_what_is_searched() -> None:
    """Servers may differ in their limits and in their memory, but not in their corpus."""
    limits = [FACTS | {"limits": {"a": n}, "memory": {"own": n}} for n in (1, 2)]
    with serving(limits[0]) as first, serving(limits[1]) as second:
        assert facts(first, second) == FACTS
    with (
        serving(FACTS) as first,
        serving(FACTS | {"corpus": {"count": 3}}) as second,
        pytest.raises(ToolError),
    ):
        facts(first, second)


def test_a_server_of_another_make_is_known_by_its_address_alone() -> None:
    """A server without /info is known by its address only; a missing token is an error."""
    with serving({}, 404) as url:
        assert facts(url) == {"retriever": "unknown", "address": url}
    with serving({}, 401) as url, pytest.raises(ToolError, match="RETRIEVER_TOKEN"):
        facts(url)


def test_settings_that_reach_no_server_are_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invalid addresses, tokens and two logins are refused, without showing the password."""
    with pytest.raises(ConfigError, match="'ftp://a'; expected http://"):
        facts("ftp://a")
    monkeypatch.setenv("RETRIEVER_TOKEN", "two words")
    with pytest.raises(ConfigError, match="RETRIEVER_TOKEN"):
        facts("http://127.0.0.1:1")
    monkeypatch.setenv("RETRIEVER_TOKEN", "word")
    with pytest.raises(ConfigError) as caught:
        facts("http://ann:hush@127.0.0.1:1")
    assert "hush" not in f"{caught.value}{caught.value.__cause__}"


def test_no_documents_need_no_server() -> None:
    """The address `empty` needs no server."""
    assert facts("empty") == {"retriever": "empty"}
