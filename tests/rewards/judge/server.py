"""A scripted judge server on a real port, which may also fail or hang."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S = 5.0
Reply = str | int | bytes | tuple[int, bytes] | None
"""Text of a chat completion, a status, a raw body, both, or None to never reply."""


@dataclass
class JudgeServer:
    """State of the server: `reply` answers request number n (from 0); requests are recorded."""

    reply: Callable[[int, dict[str, Any]], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    max_concurrent: int = 0
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append({k.lower(): v for k, v in handler.headers.items()})
            self._num_open += 1
            self.max_concurrent = max(self.max_concurrent, self._num_open)
        reply = self.reply(number, body)
        with self._lock:
            self._num_open -= 1
        self._send(handler, reply)

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply is None:
            self._closing.wait(HANG_S)
            handler.close_connection = True
            return
        status = reply if isinstance(reply, int) else 200
        if isinstance(reply, tuple):
            status, body = reply
        elif isinstance(reply, bytes):
            body = reply
        else:
            message = {"role": "assistant", "content": reply}
            completion = json.dumps({"choices": [{"message": message}]}).encode()
            body = b"{}" if status != 200 else completion
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def judge_server(reply: Callable[[int, dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    """Run a judge server on a free port."""
    state = JudgeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            state.answer(self)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state._closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def slowly(seconds: float, reply: Reply) -> Reply:
    """Wait some seconds, then return the reply."""
    time.sleep(seconds)
    return reply
