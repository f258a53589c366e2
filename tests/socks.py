"""A SOCKS5 proxy without authentication, for one connection after the other (RFC 1928)."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

ANY_HOST = b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
"""The reply that a connection was made, from an address that is not told."""


@contextlib.contextmanager
def socks_proxy(port: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the proxy's `HOST:PORT` and the names that it is asked for; all lead to `port`."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, port, asked))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, port: int, asked: list[str]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # shut down
            return
        with client, socket.create_connection(("127.0.0.1", port)) as target:
            asked.append(_handshake(client))
            back = threading.Thread(target=_copy, args=(target, client))
            back.start()
            _copy(client, target)
            back.join()


def _handshake(client: socket.socket) -> str:
    """Accept without authentication, and return the `HOST:PORT` that the client asks for."""
    _, num_methods = client.recv(2, socket.MSG_WAITALL)
    client.recv(num_methods, socket.MSG_WAITALL)
    client.sendall(b"\x05\x00")
    kind = client.recv(4, socket.MSG_WAITALL)[3]
    length = client.recv(1)[0] if kind == 3 else 4  # a name, or an IPv4 address
    host = client.recv(length, socket.MSG_WAITALL)
    (port,) = struct.unpack("!H", client.recv(2, socket.MSG_WAITALL))
    client.sendall(ANY_HOST)
    name = host.decode() if kind == 3 else socket.inet_ntoa(host)
    return f"{name}:{port}"


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
