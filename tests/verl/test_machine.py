"""The memory of this machine, as a run reads it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from verl.machine import HostMemory, control_groups, num_threads


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("", None), (None, None)])
def test_threads_are_the_users_or_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: int | None
) -> None:
    """As for OpenMP, so that workers which divide the cores, and a shared machine, are heeded."""
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert num_threads() == (expected or len(os.sched_getaffinity(0)))


def test_reading_devices_does_not_run_the_script_again(tmp_path: Path) -> None:
    """The child process that reads the GPUs does not execute the user's script again.

    It works with sys.path entries that are no strings, and with output of a sitecustomize.py.
    """
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    script = tmp_path / "own.py"
    script.write_text(
        "print('begun')\nimport sys\nfrom pathlib import Path\nsys.path.append(Path('/x'))\n"
        "from verl.machine import Machine\n"
        "print(isinstance(Machine.now(with_devices=True).devices, tuple))\n"
    )
    command = [sys.executable, str(script)]
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert done.stdout.split() == ["hello", "begun", "True"]


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """cgroup v2: each enclosing group with a limit counts, and droppable pages are free."""
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    group(tmp_path / "outer", memory__max="1000", memory__current="700",
          memory__stat="anon 600\ninactive_file 50\n")  # fmt: skip
    group(tmp_path / "outer/inner", memory__max="max", memory__current="1", memory__stat="anon 1\n")
    limits = list(control_groups(tmp_path / "membership", tmp_path))
    assert limits == [HostMemory(1000, 350)]


def test_the_limit_of_an_older_container_counts(tmp_path: Path) -> None:
    """cgroup v1: limits are in bytes, and an unlimited group has an enormous one."""
    (tmp_path / "membership").write_text("5:cpu:/a\n4:memory:/a\n")
    group(tmp_path / "memory/a", memory__limit_in_bytes="1000", memory__usage_in_bytes="400",
          memory__stat="total_inactive_file 100\n")  # fmt: skip
    group(tmp_path / "memory", memory__limit_in_bytes=str(2**63 - 4096),
          memory__usage_in_bytes="400", memory__stat="total_inactive_file 0\n")  # fmt: skip
    limits = list(control_groups(tmp_path / "membership", tmp_path))
    assert limits == [HostMemory(1000, 700)]


def test_this_machine_has_memory() -> None:
    """The values read on this machine are plausible."""
    memory = HostMemory.now()
    assert 0 < memory.free <= memory.total <= psutil.virtual_memory().total
    assert 0 <= memory.used_share < 1
