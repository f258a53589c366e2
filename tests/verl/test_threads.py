"""Idle threads sleep in every process of ours, unless the user says otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.threads import PASSIVE, spin_count, wait_passively

ROOT = Path(__file__).parents[2]
REPORT = """
import builtins, importlib, os, sys
real = builtins.__import__
def report(name, *args, **kwargs):
    if name.partition(".")[0] == "torch":
        print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), flush=True)
        os._exit(0)
    return real(name, *args, **kwargs)
builtins.__import__ = report
importlib.import_module(sys.argv[1])
"""
"""Imports a module until torch is imported, when OpenMP reads the environment."""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, PASSIVE),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
    ids=str,
)
def test_a_users_setting_is_kept_whole(own: dict[str, str], expected: dict[str, str]) -> None:
    """A default beside it could contradict it."""
    environment = dict(own)
    wait_passively(environment)
    assert environment == expected


def test_processes_that_share_cores_do_not_spin_at_all() -> None:
    """The default that this process has set does not count as the user's."""
    assert spin_count("0", {}) == spin_count("0", PASSIVE) == "0"
    assert spin_count("0", {"GOMP_SPINCOUNT": "7"}) == "7"


@pytest.mark.parametrize(
    "module",
    [
        "verl.ext.sft.run", "verl.trainer.run", "example.tiny", "search_r1.inference.model",
        "search_r1.retrieval.encoders.sentence", "searchr1.trainer",
    ],
)  # fmt: skip
def test_the_environment_is_set_before_torch_is_imported(module: str) -> None:
    """Whatever a program imports first."""
    env = {n: v for n, v in os.environ.items() if n not in PASSIVE}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "search_r1" / "compat")])
    command = [sys.executable, "-c", REPORT, module]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [" ".join(PASSIVE.values())], done.stderr
