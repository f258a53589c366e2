"""A proxy between a run and its retriever that can simulate faults."""

from __future__ import annotations

import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from tests.nightly.proofs.campaign.faults import Kind


class FaultyProxy:
    """Forwards requests to `port`; during a fault it answers POST requests accordingly.

    `struck` counts the requests that met the current fault.
    """

    def __init__(self, port: int) -> None:
        """`port` is that of the real server on this machine, and may be changed at any time."""
        self.port = port
        self.fault: Kind | None = None
        self.struck = 0
        self._healed = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The address where the run searches."""
        return f"http://127.0.0.1:{self._server.server_port}/retrieve"

    def break_for(self, kind: Kind, seconds: float, timeout_s: float = 30.0) -> int:
        """Simulate a fault for `seconds` from the first request on; returns the affected number."""
        self.struck, self.fault = 0, kind
        self._healed.clear()
        deadline = time.monotonic() + timeout_s
        while not self.struck and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        self.fault = None
        self._healed.set()
        return self.struck

    def wait_healed(self) -> None:
        """Wait until the fault is over."""
        self._healed.wait()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._healed.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handles a connection of the run."""

    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def do_GET(self) -> None:
        """Forward requests about the server itself, also during a fault."""
        self._answer(*self._forward("GET", b""))

    def do_POST(self) -> None:
        """Handle a search."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.owner.fault
        if fault is None:
            self._answer(*self._forward("POST", body))
            return
        self.owner.struck += 1
        match fault:
            case Kind.REFUSES:
                self._answer(503, b'{"detail": "too busy"}')
            case Kind.GARBAGE:
                self._answer(200, b"<html>not a search engine</html>")
            case Kind.LIES:
                self._answer(200, self._without_last_result(body))
            case Kind.HANGS:
                self.owner.wait_healed()
                self.close_connection = True
            case Kind.TRUNCATES:
                status, answer = self._forward("POST", body)
                self._answer(status, answer, keep=len(answer) // 2)
            case _:
                self.close_connection = True

    def _without_last_result(self, body: bytes) -> bytes:
        status, answer = self._forward("POST", body)
        results = json.loads(answer) if status == 200 else {"result": []}
        return json.dumps({**results, "result": results["result"][:-1]}).encode()

    def _forward(self, method: str, body: bytes) -> tuple[int, bytes]:
        """Return the real server's response; 502 if there is no server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.port, timeout=30)
        headers = {"content-type": "application/json"}
        try:
            connection.request(method, self.path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 502, b'{"detail": "no server"}'
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes, keep: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if keep is None else body[:keep])
        self.close_connection = self.close_connection or keep is not None

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the run logs what it meets."""
