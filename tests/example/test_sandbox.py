"""A user-defined tool that sends programs to a sandbox service over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from example.tools import sandbox
from example.tools.sandbox import Sandbox
from search_r1.agent.generation import build_environment
from verl.config import Config
from verl.errors import ConfigError, ToolError, ToolRefused

FILE = Path(sandbox.__file__)
Answer = tuple[int, Any]


@contextmanager
def service(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[tuple[str, list[Any]]]:
    """Serve POST /run_code on a free port; yield the address and the requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append((self.path, body))
            status, reply = answer(body)
            raw = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            with suppress(BrokenPipeError):  # the client has given up
                self.end_headers()
                self.wfile.write(raw)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def run_result(stdout: object = "", stderr: object = "", status: str = "Finished") -> Answer:
    run = {"status": status, "stdout": stdout, "stderr": stderr, "return_code": 0}
    return 200, {"status": "Success", "message": "", "run_result": run}


def ask(answer: Answer, monkeypatch: pytest.MonkeyPatch, code: str = "x") -> str:
    """Return the observation of one call of a service that gives this answer."""
    with service(lambda _: answer) as (url, requests):
        monkeypatch.setenv("SANDBOX_URL", f"{url}/")
        [item] = asyncio.run(Sandbox().call(code=code)).items
    [(path, body)] = requests
    assert path == "/run_code" and body["language"] == "python" and body["run_timeout"] == 10
    return item.text


def test_a_program_says_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, errors and an abnormal end are observations, each of bounded length."""
    assert ask(run_result("42\n"), monkeypatch) == "42"
    assert ask(run_result("before\n", "1/0\n", "Error"), monkeypatch) == "before\n1/0"
    late = ask(run_result("", "", "TimeLimitExceeded"), monkeypatch)
    assert late == "(TimeLimitExceeded)"
    assert ask(run_result(), monkeypatch, "\ud83d") == "(no output)"
    assert len(ask(run_result("x" * 10**5), monkeypatch)) == sandbox.MAX_CHARS


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((500, {}), ToolError), ((429, {}), ToolError), ((200, b"<html>"), ToolError),
        ((200, []), ToolError), ((200, {"status": "SandboxError"}), ToolError),
        (run_result(stdout=7), ToolError), ((401, {}), ToolRefused), ((403, {}), ToolRefused),
    ],
)  # fmt: skip
def test_a_failure_of_the_service_is_no_observation(
    answer: Answer, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trajectory is sampled again or the run ends; no text of a failure is trained on."""
    with pytest.raises(kind) as raised:
        ask(answer, monkeypatch)
    assert type(raised.value) is kind


def test_a_service_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends after its own limit, whatever the service does."""
    waiting = threading.Event()
    monkeypatch.setattr(sandbox, "TOTAL_S", 0.2)

    def hang(_: object) -> Answer:
        waiting.wait(5)
        return run_result()

    with service(hang) as (url, _):
        monkeypatch.setenv("SANDBOX_URL", url)
        with pytest.raises(ToolError, match="run_result"):
            asyncio.run(Sandbox().call(code="x"))
        waiting.set()


def test_a_run_starts_only_with_a_service_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`probe` runs a program; the address is required when the tool is built."""
    config = Config()
    config.agent.tools = [f"{FILE}:Sandbox"]
    monkeypatch.delenv("SANDBOX_URL", raising=False)
    with pytest.raises(ConfigError, match="SANDBOX_URL"):
        build_environment(config)
    for answer, problem in ((run_result("42\n"), ""), (run_result("41\n"), "expected 42")):
        with service(lambda _, answer=answer: answer) as (url, _):  # type: ignore[misc]
            monkeypatch.setenv("SANDBOX_URL", url)
            [tool] = build_environment(config).tools
            assert problem in tool.probe(5) and bool(problem) == bool(tool.probe(5))
    assert tool.probe(5)  # nobody listens any more
    with service(lambda _: (401, {})) as (url, _):
        monkeypatch.setenv("SANDBOX_URL", url)
        with pytest.raises(ToolRefused):
            Sandbox().probe(5)
