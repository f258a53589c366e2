"""The processes that extract texts: limits of time, memory and number."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from search_r1.online import pages
from search_r1.online.fetch import Deadline, Page, PageError
from search_r1.online.pages import EXTRACTORS, Article, ExtractorPool

GOOD = Page(
    b"<html><head><title>Danube</title></head><body><article><p>"
    + b"The Danube flows to the sea. " * 9
    + b"</p></article></body></html>",
    "text/html",
    None,
)


@pytest.fixture
def pool() -> Iterator[ExtractorPool]:
    """Yield a pool of one process."""
    pool = ExtractorPool(1)
    yield pool
    pool.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_process_is_reused(pool: ExtractorPool) -> None:
    """Texts, titles and errors of several pages come from the same process."""
    article = pool.extract(GOOD, Deadline(30), with_title=True)
    assert article.title == "Danube" and article.text.startswith("The Danube flows")
    started = children()
    with pytest.raises(PageError):
        pool.extract(Page(b"<p>", "text/html", None), Deadline(30))
    plain = Page("Gr\u00fc\u00dfe".encode("cp1252"), "text/plain", None)
    assert pool.extract(plain, Deadline(30)) == Article("", "Gr\u00fc\u00dfe")
    assert children() == started


def test_slow_pages_are_stopped(pool: ExtractorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page on which the parser takes minutes is an error; the next page is read again."""
    pool.extract(GOOD, Deadline(30))
    monkeypatch.setattr(pages, "EXTRACT_TIMEOUT_S", 0.4)
    slow = Page(b"<html><body>" + b"x<br>" * 400_000, "text/html", None)
    before, start = children(), time.monotonic()
    with pytest.raises(PageError, match=r"over 0.4 s"):
        pool.extract(slow, Deadline(30))
    assert time.monotonic() - start < 5
    assert children() < before
    monkeypatch.setattr(pages, "EXTRACT_TIMEOUT_S", 30.0)
    assert pool.extract(GOOD, Deadline(30)).text


def test_the_start_of_a_process_does_not_count(
    pool: ExtractorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of a page excludes the start of the process; the deadline includes it."""
    monkeypatch.setattr(pages, "WORKER", "tests.online.late")
    monkeypatch.setattr(pages, "EXTRACT_TIMEOUT_S", 1.0)
    plain = Page(b"The Danube", "text/plain", None)
    with pytest.raises(PageError):
        pool.extract(plain, Deadline(0.3))
    assert pool.extract(plain, Deadline(30)).text == "The Danube"


def test_large_pages_are_stopped(pool: ExtractorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that takes too much memory is an error; the next page is read again."""
    monkeypatch.setattr(pages, "EXTRACT_TIMEOUT_S", 30.0)
    with pytest.raises(PageError, match=r"MemoryError|memory"):
        pool.extract(Page(b"x" * 260_000_000, "text/plain", None), Deadline(30))
    assert pool.extract(GOOD, Deadline(30)).text


def test_waiting_for_a_process_counts(pool: ExtractorPool) -> None:
    """The deadline of a page includes the wait for a free process."""
    slow = Page(b"<html><body>" + b"x<br>" * 100_000, "text/html", None)
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(pool.extract, slow, Deadline(1.0))
        start = time.monotonic()
        with pytest.raises(PageError):
            pool.extract(GOOD, Deadline(0.2))
        assert time.monotonic() - start < 0.9
        assert isinstance(running.exception(), PageError | None)


def test_processes_exit_with_their_parent() -> None:
    """A server that is killed leaves no process behind."""
    code = (
        "import os, psutil; from search_r1.online.pages import EXTRACTORS;"
        "from search_r1.online.fetch import Deadline, Page;"
        "EXTRACTORS.extract(Page(b'a', 'text/plain', None), Deadline(30));"
        "print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid, end = int(done.stdout), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert EXTRACTORS is not None and done.stderr == ""
