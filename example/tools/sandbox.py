"""A tool that runs programs in a sandbox service: `agent.tools=[example/tools/sandbox.py:Sandbox]`.

`SANDBOX_URL` is the service's address, such as http://sandbox:8080.
It speaks SandboxFusion's protocol: `POST SANDBOX_URL/run_code` with
{"code": "print(6 * 7)", "language": "python", "run_timeout": 10}, answered by
{"run_result": {"status": "Finished", "stdout": "42\\n", "stderr": ""}} (Error, TimeLimitExceeded).
"""

import asyncio
import os
import ssl

import httpx

from search_r1 import loops
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.errors import ConfigError, ToolError, ToolRefused, explain
from verl.proxies import client_settings

RUN_S, TOTAL_S, MAX_CHARS = 10.0, 30.0, 8000
FAILURES = (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError)
TLS = ssl.create_default_context()  # loading certificates takes 30 ms, once rather than each call


class Sandbox(Tool):
    """Sends each program to the service; this process runs none of them."""

    name = "python"
    description = "Runs a Python program and returns what it prints. Nothing is kept between runs."
    parameters = text_arguments(code="The program; print what you want to see.")

    def __init__(self, config: object = None) -> None:
        url = os.environ.get("SANDBOX_URL", "")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(explain("SANDBOX_URL", repr(url), "http://HOST:PORT", "export it"))
        self.url = url.rstrip("/") + "/run_code"

    async def call(self, code: str) -> Observation:
        """Return what the program printed. Raises ToolError if the service could not run it."""
        return Observation((Item(await self.run(code, TOTAL_S)),))

    def probe(self, seconds: float) -> str:
        """Run one program; return the problem, or ''. Raises ToolRefused as `call` does."""
        try:
            text = loops.run(self.run("print(6 * 7)", seconds))
        except ToolRefused:
            raise
        except ToolError as error:
            return str(error)
        return "" if text == "42" else f"print(6 * 7) printed {text!r}, expected 42"

    def _client(self) -> httpx.AsyncClient:
        """Return a client that uses the environment's proxy, but none for this machine."""
        return httpx.AsyncClient(**client_settings(self.url) | {"verify": TLS})

    async def run(self, code: str, seconds: float) -> str:
        program = code.encode("utf-8", "replace").decode()  # JSON may contain a lone surrogate
        body = {"code": program, "language": "python", "run_timeout": RUN_S}
        kind = ToolError
        try:
            async with asyncio.timeout(seconds), self._client() as http:
                answer = await http.post(self.url, json=body, timeout=seconds)
            kind = ToolRefused if answer.status_code in (401, 403) else ToolError
            run = answer.raise_for_status().json()["run_result"]
            ending = "" if run["status"] in ("Finished", "Error") else f"({run['status']})"
            parts = run["stdout"][:MAX_CHARS].strip(), run["stderr"][-MAX_CHARS:].strip(), ending
        except FAILURES as e:
            raise kind(explain(self.url, repr(e), "a run_result", "check SANDBOX_URL")) from e
        return "\n".join(filter(None, parts)) or "(no output)"
