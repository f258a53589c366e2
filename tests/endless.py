"""A server whose responses never end: head or body arrive in drips, or at full speed."""

import contextlib
import socket
import threading
from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "status": (b"HTTP/1.1 200 ", b"O"),
    "head": (OK, b"A: b\r\n"),
    "body": (CHUNKED, b"1\r\n \r\n"),
}
"""The bytes sent at once, and those then sent every 50 ms."""
FLOOD = (CHUNKED, b"10000\r\n%b\r\n" % (b" " * 65_536))


@contextlib.contextmanager
def endless(start: bytes, part: bytes, pause: float = 0.05) -> Iterator[tuple[str, list[int]]]:
    """Serve endless responses; yield the address and a list with the number of connections."""
    closing, count = threading.Event(), [0]

    def answer(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(20)
            client.recv(100_000)
            client.sendall(start)
            while not closing.wait(pause):
                client.sendall(part)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = bound.accept()
                count[0] += 1
                threading.Thread(target=answer, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", count
        finally:
            closing.set()
            bound.shutdown(socket.SHUT_RDWR)
            thread.join()
