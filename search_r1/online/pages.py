"""Title and text of the page at a URL.

A limited number of processes extract the texts of fetched pages, within limits of time and memory.
"""

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, Page, PageError, PageFetcher

EXTRACT_TIMEOUT_S = 5.0
"""Time limit for a page once its process has started; usual pages take a tenth of it."""
MAX_ANSWER_BYTES = 64 << 20
WORKER = "search_r1.online.extraction"


@dataclass(frozen=True)
class Article:
    """The readable content of a page."""

    title: str
    """Empty if the page has none, or if it was not requested."""
    text: str


class _Extractor:
    """A process that extracts texts; it exits with this process, which closes its connection."""

    def __init__(self) -> None:
        self._connection, child_connection = multiprocessing.Pipe()
        handle = child_connection.fileno()
        # The child must find the same modules.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(handle)],
            pass_fds=[handle],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # keep the Ctrl-C of a terminal from it
        )
        child_connection.close()
        self._is_ready = False

    def extract(self, page: Page, with_title: bool, deadline: Deadline) -> dict[str, str]:
        """Return the answer; after EOFError, OSError or TimeoutError the process must be killed."""
        if not self._is_ready:
            self._receive(deadline.remaining())
            self._is_ready = True
        seconds = min(EXTRACT_TIMEOUT_S, deadline.remaining())
        self._connection.send((page, with_title, seconds))
        answer: dict[str, str] = json.loads(self._receive(seconds))
        return answer

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(MAX_ANSWER_BYTES)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


class ExtractorPool:
    """Processes that extract texts: started when needed, up to a maximum, and reused."""

    def __init__(self, max_processes: int) -> None:
        self._slots = threading.BoundedSemaphore(max_processes)
        self._idle: list[_Extractor] = []
        atexit.register(self.close)

    def extract(self, page: Page, deadline: Deadline, *, with_title: bool = False) -> Article:
        """Extract the text of a page; raises PageError, also for too much time or memory."""
        if not self._slots.acquire(timeout=deadline.remaining()):
            raise PageError("too many pages are read at once")
        try:
            try:
                extractor = self._idle.pop()
            except IndexError:
                extractor = _Extractor()
            try:
                answer = extractor.extract(page, with_title, deadline)
            except BaseException:
                extractor.kill()
                raise
            self._idle.append(extractor)
        except (TimeoutError, EOFError, OSError) as error:
            raise PageError(
                f"its text takes over {EXTRACT_TIMEOUT_S:g} s, or too much memory"
            ) from error
        finally:
            self._slots.release()
        if "error" in answer:
            raise PageError(answer["error"])
        return Article(answer["title"], answer["text"])

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


EXTRACTORS = ExtractorPool(max(2, min(8, os.cpu_count() or 2)))
"""The pool that this process shares."""


def visit(
    url: str,
    policy: AddressPolicy | None = None,
    *,
    max_bytes: int = 2_000_000,
    timeout: float = 15.0,
) -> Article:
    """Return title and text of a page, of which at most `max_bytes` are read in `timeout` seconds.

    Only public addresses are allowed, unless `policy` allows others. Raises PageError.
    """
    fetcher, deadline = PageFetcher(policy or AddressPolicy(), max_bytes), Deadline(timeout)
    try:
        return EXTRACTORS.extract(fetcher.fetch(url, deadline), deadline, with_title=True)
    finally:
        fetcher.close()
