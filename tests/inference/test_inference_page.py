"""The commands and names in docs/guides/inference.md are correct."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

import infer
from search_r1 import mcp_server, serve
from search_r1.agent_server import requests, responses, service
from search_r1.infer import InferOptions
from search_r1.options import parse
from search_r1.sharing.push import PushOptions
from tests.agent_server.services import serving
from tests.fakes import ScriptedEngine
from tests.inference.scripted import TWO_SEARCHES, session

PAGE = (Path(infer.__file__).parent / "docs/guides/inference.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [
    shlex.split(line, comments=True)
    for block in blocks("bash")
    for line in block.replace("\\\n", " ").splitlines()
]
OPTIONS = {"infer.py": InferOptions, "search_r1.serve": serve.ServingOptions,
           "search_r1.mcp_server": mcp_server.McpOptions, "push": PushOptions}  # fmt: skip


def test_every_command_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """The options and scripts that it names exist; `tests/test_infer.py` runs such commands."""
    for words in COMMANDS:
        name = words[2] if words[1] == "-m" else words[1]
        if words[0] == "bash":
            assert (Path(infer.__file__).parent / name).is_file()
            continue
        options = words[3:] if words[1] == "-m" else words[2:]
        with pytest.raises(SystemExit, match="0") if "--help-all" in options else nullcontext():
            parse(OPTIONS[name], options, prog=name, description=None)
    capsys.readouterr()


def test_the_python_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python example prints the documented output, with a scripted agent."""
    (code,) = blocks("python")
    with serving(session(ScriptedEngine(TWO_SEARCHES))) as url:
        exec(code.replace("http://127.0.0.1:8001", url), {})
    assert capsys.readouterr().out.splitlines() == [
        "Oslo", "Where?", "", "Sure?", "", "So it is.",
        "capital of Norway ['Oslo', 'Norway']", "Oslo ['Oslo']",
    ]  # fmt: skip


def test_the_configuration_starts_the_tool_server() -> None:
    """The arguments of the MCP configuration are valid."""
    (text,) = blocks("json")
    server = json.loads(text)["mcpServers"]["search-r1"]
    assert server["args"][:2] == ["-m", "search_r1.mcp_server"]
    parse(mcp_server.McpOptions, server["args"][2:], prog="mcp", description=None)


def test_names_and_defaults_of_the_page_are_those_of_the_code() -> None:
    """Ports, the token's variable, refused fields and routes on the page match the code."""
    options = serve.ServingOptions()
    assert f"--port {options.port}" in PAGE and f"127.0.0.1:{options.port}/v1" in PAGE
    assert f'model="{options.name}"' in PAGE
    assert f"`{service.TOKEN_VARIABLE}`" in PAGE
    assert f"127.0.0.1:{mcp_server.McpOptions().port}/mcp" in PAGE
    refused = re.search(r"are\s+not\s+supported\s+\((.*?) …\)", PAGE, re.DOTALL)
    assert refused is not None
    assert set(re.findall(r"`(\w+)`", refused[1])) <= set(requests.UNSUPPORTED)
    assert responses.ApiError(503, "").body()["error"]["type"] == "server_error"
    served = service.build_app(service.AgentService(session(ScriptedEngine([])), "m"))
    assert {route.path for route in served.routes} >= {
        "/v1/chat/completions", "/v1/models", "/health",
    }  # fmt: skip
