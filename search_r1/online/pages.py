"""The text of the page at an address: fetched, read in another process, and kept.

Processes take the text out of pages, within a time, a memory and a number.
"""

import atexit
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, Page, PageError, PageFetcher
from search_r1.storage import Storage

logger = logging.getLogger(__name__)

MOST_KEPT = 100_000
"""Characters of a page; beyond them only what is asked for."""
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
            answer = self._read(page, with_title, deadline)
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

    def _read(self, page: Page, with_title: bool, deadline: Deadline) -> dict[str, str]:
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
        return answer


READERS = Readers(max(2, min(8, os.cpu_count() or 2)))
"""Those of this process."""


def visit(
    url: str,
    policy: AddressPolicy | None = None,
    *,
    most_bytes: int = 2_000_000,
    timeout: float = 15.0,
) -> Article:
    """Title and text of a public page, or of one that `policy` allows; raises PageError."""
    fetcher, deadline = PageFetcher(policy or AddressPolicy(), most_bytes), Deadline(timeout)
    try:
        return READERS.read(fetcher.fetch(url, deadline), deadline, with_title=True)
    finally:
        fetcher.close()


class PageReader:
    """Texts of pages, kept ones first."""

    def __init__(self, fetcher: PageFetcher, texts: Storage, scope: str, most_chars: int) -> None:
        """`scope` tells the pages of `texts` apart by how they were read."""
        self._fetcher = fetcher
        self._texts = texts
        self._scope = scope
        self._most_chars = most_chars

    def text(self, url: str, deadline: Deadline) -> str | None:
        """The first characters of the page's text, cut at a word; None if it cannot be read."""
        key = ("page", self._scope, url)
        text = self._texts.get([key]).get(key)
        if text is None:
            try:
                whole = READERS.read(self._fetcher.fetch(url, deadline), deadline).text
                text = cut(whole, max(MOST_KEPT, self._most_chars))
            except PageError as error:
                logger.info("no text of page %r: %s", url, error)
                return None
            self._texts.put({key: text})
        return cut(text, self._most_chars)

    def close(self) -> None:
        """Let go of threads."""
        self._fetcher.close()


def cut(text: str, most_chars: int) -> str:
    """`text` cut at a space or a line's end."""
    if len(text) <= most_chars:
        return text
    head = text[:most_chars]
    return head.rstrip() if text[most_chars].isspace() else re.sub(r"\s+\S*\Z", "", head) or head
