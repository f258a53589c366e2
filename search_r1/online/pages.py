"""The text of the page at an address: fetched, and read in another process.

Processes take the text out of pages, within a time, a memory and a number.
"""

import atexit
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, Page, PageError, PageFetcher

READ_S = 5.0
"""Of a page, once its process is there; usual ones take a tenth."""
MOST_ANSWER = 64 << 20
WORKER = "search_r1.online.extraction"


@dataclass(frozen=True)
class Article:
    """What can be read on a page."""

    title: str
    """Empty where the page has none, or nobody asked."""
    text: str


class _Reader:
    """One process; it ends when this one does, since its connection then has."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        handle = theirs.fileno()
        command = [sys.executable, "-m", WORKER, str(handle)]
        # what this process finds, that one must find too
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command,
            pass_fds=[handle],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # else a Ctrl-C at a terminal were its too
        )
        theirs.close()
        self._is_ready = False

    def read(self, page: Page, with_title: bool, deadline: Deadline) -> dict[str, str]:
        """Its answer; raises EOFError, OSError or TimeoutError, after which it is of no use."""
        if not self._is_ready:
            self._received(deadline.left())
            self._is_ready = True
        seconds = min(READ_S, deadline.left())
        self._connection.send((page, with_title, seconds))
        answer: dict[str, str] = json.loads(self._received(seconds))
        return answer

    def _received(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(MOST_ANSWER)

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class Readers:
    """Starts as many processes as there are pages at once, up to `most`, and keeps them."""

    def __init__(self, most: int) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._idle: list[_Reader] = []
        atexit.register(self.close)

    def read(self, page: Page, deadline: Deadline, *, with_title: bool = False) -> Article:
        """What the page says; raises PageError, also where it takes too much time or memory."""
        if not self._places.acquire(timeout=deadline.left()):
            raise PageError("too many pages are read at once")
        try:
            try:
                reader = self._idle.pop()
            except IndexError:
                reader = _Reader()
            try:
                answer = reader.read(page, with_title, deadline)
            except BaseException:
                reader.kill()
                raise
            self._idle.append(reader)
        except (TimeoutError, EOFError, OSError) as error:
            raise PageError(f"its text takes over {READ_S:g} s, or too much memory") from error
        finally:
            self._places.release()
        if "error" in answer:
            raise PageError(answer["error"])
        return Article(answer["title"], answer["text"])

    def close(self) -> None:
        """End the processes that wait for pages."""
        while self._idle:
            self._idle.pop().kill()


READERS = Readers(max(2, min(8, os.cpu_count() or 2)))
"""Those of this process."""


def visit(
    url: str,
    policy: AddressPolicy | None = None,
    *,
    most_bytes: int = 2_000_000,
    timeout: float = 15.0,
) -> Article:
    """Title and text of a page, of which at most `most_bytes` are read, within `timeout` s.

    Only public addresses are fetched from, unless `policy` allows others. Raises PageError.
    """
    fetcher, deadline = PageFetcher(policy or AddressPolicy(), most_bytes), Deadline(timeout)
    try:
        return READERS.read(fetcher.fetch(url, deadline), deadline, with_title=True)
    finally:
        fetcher.close()


def cut(text: str, most_chars: int) -> str:
    """`text` cut at a space or a line's end."""
    if len(text) <= most_chars:
        return text
    head = text[:most_chars]
    return head.rstrip() if text[most_chars].isspace() else re.sub(r"\s+\S*\Z", "", head) or head
