"""Pages are read by processes that can be ended: bounded in time, memory and number."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from search_r1.online import pages
from search_r1.online.fetch import Deadline, Page, PageError
from search_r1.online.pages import READERS, Article, Readers

GOOD = Page(
    b"<html><head><title>Danube</title></head><body><article><p>"
    + b"The Danube flows to the sea. " * 9
    + b"</p></article></body></html>",
    "text/html",
    None,
)


@pytest.fixture
def readers() -> Iterator[Readers]:
    """One process at most."""
    readers = Readers(1)
    yield readers
    readers.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_process_is_kept_from_page_to_page(readers: Readers) -> None:
    """Text and title come back, an error likewise, and the next page costs no new process."""
    article = readers.read(GOOD, Deadline(30), with_title=True)
    assert article.title == "Danube" and article.text.startswith("The Danube flows")
    started = children()
    with pytest.raises(PageError, match="it has no text"):
        readers.read(Page(b"<p>", "text/html", None), Deadline(30))
    plain = Page("Gr\u00fc\u00dfe".encode("cp1252"), "text/plain", None)
    assert readers.read(plain, Deadline(30)) == Article("", "Gr\u00fc\u00dfe")
    assert children() == started


def test_slow_pages_are_ended(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of line breaks, on which the parser takes minutes; the next page is read again."""
    readers.read(GOOD, Deadline(30))
    monkeypatch.setattr(pages, "READ_S", 0.4)
    slow, before, start = (
        Page(b"<html><body>" + b"x<br>" * 400_000, "text/html", None),
        children(),
        time.monotonic(),
    )
    with pytest.raises(PageError, match=r"over 0.4 s"):
        readers.read(slow, Deadline(30))
    assert time.monotonic() - start < 5
    assert children() < before
    monkeypatch.setattr(pages, "READ_S", 30.0)
    assert readers.read(GOOD, Deadline(30)).text


def test_the_start_of_a_process_is_no_time_of_its_page(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that starts for longer than a page may take; the deadline holds there too."""
    monkeypatch.setattr(pages, "WORKER", "tests.online.late")
    monkeypatch.setattr(pages, "READ_S", 1.0)
    plain = Page(b"The Danube", "text/plain", None)
    with pytest.raises(PageError, match="takes over"):
        readers.read(plain, Deadline(0.3))
    assert readers.read(plain, Deadline(30)).text == "The Danube"


def test_large_pages_are_ended(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes more memory than is allowed is an error of that page alone."""
    monkeypatch.setattr(pages, "READ_S", 30.0)
    with pytest.raises(PageError, match=r"MemoryError|memory"):
        readers.read(Page(b"x" * 260_000_000, "text/plain", None), Deadline(30))
    assert readers.read(GOOD, Deadline(30)).text


def test_waiting_for_a_process_counts(readers: Readers) -> None:
    """Of pages beyond the number each keeps to its own deadline; none is lost."""
    slow = Page(b"<html><body>" + b"x<br>" * 100_000, "text/html", None)
    with ThreadPoolExecutor(3) as pool:
        under_way = pool.submit(readers.read, slow, Deadline(1.0))
        start = time.monotonic()
        with pytest.raises(PageError):
            readers.read(GOOD, Deadline(0.2))
        assert time.monotonic() - start < 0.9
        assert isinstance(under_way.exception(), PageError | None)


def test_readers_end_with_their_starter() -> None:
    """A server that is killed leaves no process behind."""
    code = (
        "import os, psutil; from search_r1.online.pages import READERS;"
        "from search_r1.online.fetch import Deadline, Page;"
        "READERS.read(Page(b'a', 'text/plain', None), Deadline(30));"
        "print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid, end = int(done.stdout), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert READERS is not None and done.stderr == ""
