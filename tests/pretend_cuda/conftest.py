"""Trials on pretended cards, each in a process of its own: `machine` changes torch for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.pretend_cuda.machine import build_guard

ROOT = Path(__file__).resolve().parents[2]
Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="session")
def try_out(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Any]], Outcomes]:
    """Run cases (`trial.Case` as dictionaries), in two processes; the outcome of each."""
    guard = build_guard(tmp_path_factory.mktemp("guard"))

    def run(cases: Sequence[Any]) -> Outcomes:
        with ThreadPoolExecutor(2) as pool:
            halves = pool.map(run_in_order, (cases[::2], cases[1::2]))
            found = [outcome for pair in zip_longest(*halves) for outcome in pair]
        return found[: len(cases)]

    def run_in_order(cases: Sequence[Any]) -> Outcomes:
        done = subprocess.run(
            [sys.executable, "-m", "tests.pretend_cuda", str(guard), json.dumps(cases)],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
