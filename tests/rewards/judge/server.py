"""A judge on a real port that replies, breaks down and dawdles as its script says."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S = 5.0
Reply = str | int | bytes | None
"""Text of a chat completion, a status, a raw body, or None: no reply at all."""


@dataclass
class JudgeServer:
    """What the server was asked, and what it replies to request number n (from 0)."""

    reply: Callable[[int, dict[str, Any]], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append({k.lower(): v for k, v in handler.headers.items()})
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        reply = self.reply(number, body)
        with self._lock:
            self._now -= 1
        self._send(handler, reply)

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply is None:
            self._closing.wait(HANG_S)
            handler.close_connection = True
            return
        status = reply if isinstance(reply, int) else 200
        message = {"role": "assistant", "content": reply}
        completion = json.dumps({"choices": [{"message": message}]}).encode()
        body = reply if isinstance(reply, bytes) else b"{}" if status != 200 else completion
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def judge_server(reply: Callable[[int, dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    """A server on a free port, gone afterwards."""
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
    """The reply, after some seconds."""
    time.sleep(seconds)
    return reply
