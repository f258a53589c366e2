"""Cores of ranks and engines on a CPU."""

import os
import subprocess
import sys

import pytest


def test_engines_and_ranks_on_cpu_have_separate_cores() -> None:
    """Processes of engines, and their children, share no core with those of ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    script = (
        "import os, subprocess, sys, threading, torch\n"
        "torch.ones(99, 99) @ torch.ones(99, 99)\n"
        "from verl.ext.cpu.cores import pin_to_cores\n"
        "pin_to_cores(1, sys.argv[1] == 'engine')\n"
        "ask = 'import os; print(*sorted(os.sched_getaffinity(0)))'\n"
        "threads = [os.sched_getaffinity(int(t)) for t in os.listdir('/proc/self/task')]\n"
        "assert all(one == os.sched_getaffinity(0) for one in threads)\n"
        "assert torch.get_num_threads() == len(threads[0]) == int(os.environ['OMP_NUM_THREADS'])\n"
        "print(subprocess.check_output([sys.executable, '-c', ask], text=True))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script, side], stdout=subprocess.PIPE, text=True)
        for side in ("engine", "rank")
    ]
    used = [[int(core) for core in process.communicate()[0].split()] for process in running]
    assert used == [cores[:1], cores[1:]]
