"""The tool `python`: programs run with limits, without network or access to other processes."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from search_r1.agent import python
from search_r1.agent.python import CUT, Bounds, PythonTool
from verl.errors import ToolError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confined by Linux's kernel")


def run(code: str, **bounds: float) -> str:
    """Run a program and return the text of the observation."""
    tool = PythonTool(bounds=Bounds(**{"seconds": 20, **bounds}))
    (item,) = asyncio.run(tool.call(code=code)).items
    return item.text


def test_a_program_says_what_it_prints() -> None:
    """Stdout and stderr come back in order, without stack frames of the sandbox."""
    assert run("print(6 * 7)\nprint('é')") == "42\né"
    assert run("x = 1") == "(no output)"
    failed = run("print('before', flush=True)\n1/0")
    assert failed.startswith("before\n") and failed.endswith("ZeroDivisionError: division by zero")
    assert "confinement" not in failed
    assert "SyntaxError" in run("for")
    # A native tool call is JSON, in which a policy may write a lone surrogate.
    assert run(json.loads("\"print(len('\\ud83d'))\"")) == "1"


def test_programs_keep_nothing_of_each_other() -> None:
    """Each program starts in an empty folder and an environment without secrets."""
    assert (
        run("open('a', 'w').write('x'); import os; print(sorted(os.listdir()))")
        == "['a', 'output']"
    )
    assert run("import os; print(os.listdir())") == "['output']"
    names = run("import os; print(sorted(os.environ))")
    assert "KEY" not in names and "HOME" not in names


@pytest.mark.parametrize(
    ("code", "bounds", "expected"),
    [
        ("while True: pass", {"seconds": 1}, "time is up"),
        ("import time; time.sleep(60)", {"seconds": 0.5}, "time is up"),
        ("x = 'a' * (2 << 30)", {}, "MemoryError"),
        ("print('x' * 100_000)", {"output": 50}, "x" * 50 + CUT),
        ("open('f', 'wb').write(bytes(1 << 20))", {"files": 1000}, "File too large"),
    ],
)
def test_bounds_hold(code: str, bounds: dict[str, float], expected: str) -> None:
    """Limits of time, memory, output and files hold, and the observation says so."""
    began = time.monotonic()
    assert expected in run(code, **bounds)
    assert time.monotonic() - began < 15


def test_there_is_no_network() -> None:
    """Neither the program nor a child process can reach a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        assert "PermissionError" in run(code)
        inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
        assert "PermissionError" in run(inner)


def test_other_processes_are_out_of_reach() -> None:
    """A program cannot signal other processes, and its children are killed when it ends."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert "PermissionError" in run(f"import os; os.kill({sleeper.pid}, 9)")
        queue = f"import ctypes; print(ctypes.CDLL(None).sigqueue({sleeper.pid}, 9, None))"
        assert run(queue) == "-1"
        assert "PermissionError" in run("import os; os.setsid()")
        left = int(run("import os, time\npid = os.fork()\nif not pid: time.sleep(60)\nprint(pid)"))
        assert sleeper.poll() is None
    except ValueError:  # RLIMIT_NPROC lets only root fork
        return
    finally:
        sleeper.kill()
        sleeper.wait()
    for _ in range(100):
        if not Path(f"/proc/{left}").exists() or "zombie" in status(left):
            return
        time.sleep(0.05)
    raise AssertionError(f"{left} still runs: {status(left)}")


def status(pid: int) -> str:
    """Return the kernel's status file of a process."""
    return Path(f"/proc/{pid}/status").read_text()


def test_the_probe_says_whether_programs_are_confined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passes here; if the sandbox cannot be set up, no program runs and it says why."""
    assert PythonTool().probe(20) == ""
    broken = tmp_path / "confinement.py"
    broken.write_text("raise OSError('the kernel has no seccomp filters')")
    monkeypatch.setattr(python, "CONFINEMENT", broken)
    assert "no seccomp filters" in PythonTool().probe(20)


def test_no_process_at_all_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing interpreter is not the policy's mistake."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ToolError, match="fix: run on Linux"):
        run("print(1)")


def test_places_are_those_of_each_event_loop() -> None:
    """The concurrency limit works in each of several event loops."""
    tool = PythonTool(bounds=Bounds(seconds=20, at_once=1))

    async def several() -> list[str]:
        observations = await asyncio.gather(*(tool.call(code="print(1)") for _ in range(2)))
        return [observation.items[0].text for observation in observations]

    for _ in range(2):
        assert asyncio.run(several()) == ["1", "1"]


def test_many_programs_wait_for_a_place() -> None:
    """No more programs run concurrently than `Bounds.at_once`."""
    tool = PythonTool(bounds=Bounds(seconds=20, at_once=2))
    code = "import time; print(time.time()); time.sleep(0.3); print(time.time())"

    async def several() -> list[str]:
        observations = await asyncio.gather(*(tool.call(code=code) for _ in range(4)))
        return [observation.items[0].text for observation in observations]

    spans = [tuple(float(line) for line in text.split()) for text in asyncio.run(several())]
    overlaps = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert max(overlaps) <= 2
