"""The retrieval server: one wire contract over any engine, built for many clients at once.

A bearer token is read from the environment variable RETRIEVER_TOKEN only, since flags show in the
list of processes; clients then send `Authorization: Bearer TOKEN`. See docs/retriever.md.
"""

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.options import Port, run
from search_r1.plain import configure_logging
from search_r1.search.backends.base import Retriever
from search_r1.search.backends.registry import build_retriever
from search_r1.search.corpus import Corpus
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.memory import check_memory
from search_r1.search.recording import Recorder
from search_r1.search.schema import TOKEN_VARIABLE, Document
from search_r1.search.server.app import create_app
from search_r1.search.server.faults import FaultInjector
from search_r1.search.server.running import bind, read_token, serve, warn_if_open
from search_r1.search.settings import FaultConfig, RetrieverConfig, ServiceConfig

__all__ = ["bind", "create_app", "main", "serve"]

logger = logging.getLogger(__name__)

WATCH_S = 1.0
MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class ServerOptions:
    """Every flag of the server."""

    host: str = "127.0.0.1"
    """address to bind to"""
    port: Port = 8000
    """0 picks a free port"""
    port_file: Path | None = None
    """file that receives the port once requests are accepted"""
    allowed_hosts: tuple[str, ...] = ()
    """names in a request's Host, beside addresses and localhost; bound to this machine alone no
    others are taken, elsewhere all are until some are given (*: any)"""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)


def _run(options: ServerOptions) -> int:
    """Serve until stopped; the exit status."""
    service, faults = options.service, options.faults
    service.check()
    faults.check()
    token = read_token(TOKEN_VARIABLE)
    with bind(options.host, options.port, options.port_file) as bound:
        warn_if_open(bound, token)
        try:
            check_memory(options.retriever)
            retriever = build_retriever(options.retriever)
        except OSError as error:
            raise SetupError(
                f"{error}; expected files and folders that may be read: correct their permissions"
            ) from error
        if retriever.num_threads == 1:  # asks no network: no client shall wait for a first search
            retriever.search(["warm up"], service.topk)
        logger.info("%s: %d documents", retriever.name, retriever.num_documents)
        recorder = None if service.record is None else Recorder(service.record, retriever.info())
        find = _finder(retriever, options.retriever.corpus_path)
        app = create_app(retriever, service, token=token, recorder=recorder, find=find)
        if faults.is_on:
            logger.warning("TEST FAULTS: requests fail on purpose: %s", faults)
            app.add_middleware(FaultInjector, config=faults)
        corpus = options.retriever.corpus_path
        default_index = corpus and str(Path(corpus).parent / "index")
        is_idle, status = True, 1
        try:
            with watching((options.retriever.index_path, corpus, default_index)):
                is_idle = serve(app, bound, options.port_file, options.allowed_hosts)
        except IndexMismatch as error:  # logged when it was seen
            if is_idle:
                raise
            status = error.exit_code
    if not is_idle:
        logger.warning("stopped in the middle of a search that did not end in time")
        logging.shutdown()
        os._exit(status)  # the thread that searches cannot be stopped otherwise
    return 0


def _finder(
    retriever: Retriever, corpus_path: str | None
) -> Callable[[str], Document | None] | None:
    """Finds documents by id: in the corpus that is searched, in one that a backend does not read
    once it is asked for; None without a file."""
    if isinstance(searched := getattr(retriever, "corpus", None), Corpus):
        return searched.find
    if corpus_path is None or not Path(corpus_path).is_file():
        return None
    opening, opened = threading.Lock(), functools.cache(Corpus.open)

    def find(id: str) -> Document | None:
        with opening:
            corpus = opened(corpus_path)
        return corpus.find(id)

    return find


@contextmanager
def watching(roots: Iterable[str | None]) -> Iterator[None]:
    """Send SIGTERM when a file below `roots` that is mapped changes; IndexMismatch on leaving.

    Builders rename a new index into its place, which leaves a server its own files. What else
    writes into them (`cp`, `rsync --inplace`) is seen within WATCH_S, on Linux. A search that reads
    beyond the end of a file that was cut off meanwhile ends the process at once (SIGBUS).
    """
    before = {path: _state(path) for path in _mapped([Path(r).resolve() for r in roots if r])}
    problems: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(WATCH_S):
            for path, was in before.items():
                now = _state(path)
                if was and now and now[0] == was[0] and now != was and not problems:
                    problems.append(
                        f"{path} was changed in place while it was served, expected the file that "
                        "was opened; fix: rename a new file into its place, start the server again"
                    )
                    logger.error("stopping: %s", problems[0])
            if problems:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look, name="watch-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if problems:
        raise IndexMismatch(problems[0])


def _mapped(roots: list[Path]) -> set[Path]:
    if not MAPS.exists():
        return set()
    lines = MAPS.read_text(errors="surrogateescape").splitlines()
    paths = {Path("/" + line.partition("/")[2]) for line in lines if "/" in line}
    return {path for path in paths if any(path.is_relative_to(root) for root in roots)}


def _state(path: Path) -> tuple[int, int, int] | None:
    """The file's number, size and time of change; None where it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    faulthandler.enable(sys.__stderr__ or sys.stderr)  # a file that was cut off: SIGBUS
    work = "search_r1.search.retrieval_server:_run"
    return run(work, ServerOptions, argv, prog="retrieval_server", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
