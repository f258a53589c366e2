"""The retriever as an MCP tool, called by the SDK's own client over both transports."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server import MCPServer
from mcp_types import CallToolResult, TextContent

from search_r1 import mcp_server
from search_r1.mcp_tool import build_server
from search_r1.retrieval.local_server import LocalServer

ROOT = Path(mcp_server.__file__).parents[1]
ROWS = [
    {"id": "12", "contents": '"Oslo"\nOslo is the capital of Norway.'},
    {"id": "7", "contents": '"Norway"\nNorway lies in Europe.'},
    {"id": "9", "contents": '"Ghana"\nGhana lies in Africa.'},
]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real retrieval server over three passages."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with LocalServer(["--corpus_path", str(corpus)]) as server:
        yield server.url


def words(url: str, *more: str) -> list[str]:
    return ["-m", "search_r1.mcp_server", "--retriever-url", url, *more]


def call(url: str, *calls: dict[str, Any]) -> list[CallToolResult]:
    """Call the tool over standard input and output, once for each of the arguments in `calls`."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    program = StdioServerParameters(command=sys.executable, args=words(url), env=environment)

    async def play() -> list[CallToolResult]:
        async with Client(stdio_client(program)) as client:
            (tool,) = (await client.list_tools()).tools
            assert tool.name == "search"
            assert tool.input_schema["required"] == ["query"]
            assert set(tool.input_schema["properties"]) == {"query", "topk"}
            assert tool.output_schema is not None
            return [await client.call_tool("search", arguments) for arguments in calls]

    return asyncio.run(play())


BAD_CALLS = [({"query": " "}, "empty query"), ({"query": "a", "topk": 0}, "topk"), ({}, "query")]
"""Arguments, and the argument that the error names."""


@pytest.fixture(scope="module")
def results(retriever: str) -> list[CallToolResult]:
    """Results of the bad calls, and of a good one after them, from one server."""
    bad = (arguments for arguments, _ in BAD_CALLS)
    return call(retriever, *bad, {"query": "capital of Norway", "topk": 2})


def test_the_tool_returns_documents(results: list[CallToolResult]) -> None:
    """The result has topk documents, best first, as structured content and as text."""
    got = results[-1]
    expected = {
        "documents": [
            {"id": "12", "title": "Oslo", "text": "Oslo is the capital of Norway."},
            {"id": "7", "title": "Norway", "text": "Norway lies in Europe."},
        ]
    }
    assert got.structured_content == expected
    assert isinstance(got.content[0], TextContent)
    assert json.loads(got.content[0].text) == expected


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_a_bad_call_is_an_error_that_the_model_can_read(
    number: int, results: list[CallToolResult]
) -> None:
    """The error names the invalid argument."""
    got, (_, message) = results[number], BAD_CALLS[number]
    assert got.is_error
    assert isinstance(got.content[0], TextContent)
    assert message in got.content[0].text


def test_a_retriever_that_is_away_is_an_error_too() -> None:
    """An unavailable retriever gives an error, not an empty result."""

    async def play() -> CallToolResult:
        async with Client(build_server("http://127.0.0.1:9")) as client:
            return await client.call_tool("search", {"query": "a"})

    got = asyncio.run(play())
    assert got.is_error
    assert isinstance(got.content[0], TextContent)
    assert "the search failed" in got.content[0].text


def test_it_is_served_over_http(retriever: str) -> None:
    """The tool is served by streamable HTTP at /mcp."""
    command = [sys.executable, *words(retriever, "--transport", "streamable-http", "--port", "0")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    async def ask(url: str) -> Any:
        async with Client(url) as client:
            return (await client.call_tool("search", {"query": "Africa"})).structured_content

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stderr is not None
            line = next(line for line in program.stderr if "served at" in line)
            url = line.split()[-1]
            _wait(int(url.removesuffix("/mcp").rpartition(":")[2]), program)
            got = asyncio.run(ask(url))
        finally:
            program.terminate()
    assert [document["title"] for document in got["documents"]][:1] == ["Ghana"]


def _wait(port: int, program: subprocess.Popen[str]) -> None:
    """Wait until the port accepts connections."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and program.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"port {port} does not accept connections")


def test_a_url_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid url is refused before anything is served."""
    assert mcp_server.main(["--retriever-url", "ftp://x"]) == 2
    assert "--retriever-url ftp://x" in capsys.readouterr().err


def test_a_port_that_is_taken_and_an_open_address(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """A port in use gives one line and status 2; an address open to the network gives a warning."""
    monkeypatch.setattr(MCPServer, "run", lambda *_, **__: None)
    http = ["--transport", "streamable-http", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert mcp_server.main([*http, str(taken.getsockname()[1])]) == 2
    assert "another --port" in capsys.readouterr().err
    assert mcp_server.main([*http, "0"]) == 0 and not caplog.records
    assert mcp_server.main([*http, "0", "--host", "0.0.0.0"]) == 0
    assert "anyone who can reach this address can search" in caplog.text


def test_without_its_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the optional MCP package, the message has the install command."""
    monkeypatch.delitem(sys.modules, "search_r1.mcp_tool", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server", None)  # makes the import fail
    assert mcp_server.main([]) == 2
    assert "fix: pip install" in capsys.readouterr().err
