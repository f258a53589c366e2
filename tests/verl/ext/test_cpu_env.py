"""Environment variables by which actors compute fast."""

import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from verl import malloc
from verl.config import Config
from verl.ext.cpu_env import cpu_env, shares_cores
from verl.malloc import _jemalloc
from verl.preflight.undecided import with_options
from verl.threads import SPIN_COUNT


@pytest.mark.parametrize(
    ("change", "spins"),
    [
        ({}, SPIN_COUNT),
        ({"actor_rollout_ref.rollout.max_staleness": 1}, "0"),
        (
            {"actor_rollout_ref.rollout.max_staleness": 1, "trainer.rollout_gpus": 1},
            SPIN_COUNT,
        ),
        ({"actor_rollout_ref.rollout.num_replicas": 2}, "0"),
        ({"critic.n_gpus_per_node": 1}, "0"),
        ({"trainer.n_gpus_per_node": 2}, "0"),
        ({"trainer.n_gpus_per_node": 1, "trainer.nnodes": 2}, SPIN_COUNT),
    ],
    ids=str,
)
def test_threads_spin_unless_processes_share_cores(
    change: dict[str, Any], spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines that take turns, or have other cores; a user's setting takes precedence."""
    config = with_options(Config(), {"trainer.n_gpus_per_node": 1, **change})
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert cpu_env(shares_cores(config))["GOMP_SPINCOUNT"] == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert cpu_env(shares_cores(config))["GOMP_SPINCOUNT"] == "7"


IN_A_THREAD = """
import resource
import threading
import torch

def new_pages():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(32)]
    torch.ones(1 << 25)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

thread = threading.Thread(target=lambda: print(*(new_pages() for _ in range(10))))
torch.set_num_threads(1)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
@pytest.mark.parametrize(("has_jemalloc", "most"), [(True, 8192), (False, 100)])
def test_a_thread_touches_pages_once(
    has_jemalloc: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray calls actors in a thread, for which glibc would create a separate arena."""
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(malloc, "_jemalloc", _jemalloc if has_jemalloc else lambda: None)
    env = os.environ | cpu_env()
    command = [sys.executable, "-c", IN_A_THREAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert min(map(int, done.stdout.split())) < most  # of 65,536
