"""Ctrl-C at a terminal during a step of a real run; the terminal signals all its processes."""

import os
import pty
import select
import time
from pathlib import Path

import psutil
import pytest

from tests.compare import read_rows
from tests.test_end_to_end import ROOT, command_of, start_world
from tests.test_stop_and_resume import OPTIONS
from verl.checkpoint import folders
from verl.errors import Interrupted
from verl.machine import SHARED_MEMORY
from verl.weights.node_folder import PREFIX

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

CTRL_C = b"\x03"


def read(terminal: int, text: bytearray) -> bool:
    """Add the terminal's output of a moment to `text`; return false once no process writes."""
    if not select.select([terminal], [], [], 0.2)[0]:
        return True
    try:
        arrived = os.read(terminal, 1 << 16)
    except OSError:
        return False
    text += arrived
    return bool(arrived)


def weights_in_memory() -> set[Path]:
    """Return the shared-memory folders of all runs' weight transfers on this machine."""
    return set(SHARED_MEMORY.glob(f"{PREFIX}*"))


def start(command: list[str]) -> tuple[int, int]:
    """Start a process in the foreground of a new terminal; return its id and the terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execv(command[0], command)
    return process, terminal


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_and_a_second_one_ends(tmp_path: Path, times: int) -> None:
    """One Ctrl-C saves what is finished (status 75), two end the run at once (status 130).

    Both do so without a traceback, and leave neither processes nor shared memory of the run.
    """
    out = tmp_path / "run"
    out.mkdir()
    before = weights_in_memory()
    with start_world(tmp_path) as world:
        command = command_of(world, out, *OPTIONS, "trainer.total_training_steps=500")
        process, terminal = start(command)
        text, pressed = bytearray(), 1
        while not read_rows(out / "metrics.jsonl"):
            assert read(terminal, text), text[-3000:].decode()
        family = psutil.Process(process).children(recursive=True)
        memory = weights_in_memory() - before
        assert len(family) > 5 and memory
        os.write(terminal, CTRL_C)
        while read(terminal, text):
            if pressed < times and b"again ends at once" in text:
                os.write(terminal, CTRL_C)
                pressed += 1
        _, status = os.waitpid(process, 0)
    said = text.decode(errors="replace")
    assert os.waitstatus_to_exitcode(status) == (Interrupted.exit_code if times == 1 else 130), said
    assert "Traceback" not in said and "resume_mode=auto" in said
    assert (folders.latest(out) is not None) == (times == 1)
    assert not [child for child in family if child.is_running()]
    end = time.monotonic() + 30  # the process that removes them outlives the run by a moment
    while memory & weights_in_memory() and time.monotonic() < end:
        time.sleep(0.2)
    assert not memory & weights_in_memory()
