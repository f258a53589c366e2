"""Runs trials on simulated GPUs in subprocesses, since `machine` patches torch irreversibly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.nightly.pretend_cuda.machine import build_guard

ROOT = Path(__file__).resolve().parents[3]
Outcomes = list[dict[str, Any]]


SHELL = '"$@" > "$0" 2> "$0.err"; echo $? > "$0.part"; mv "$0.part" "$0.rc"'
"""Runs a command, with its output, errors and, once it has ended, exit status in files."""


class Trials:
    """Running trials of cases (`trial.Case` as dictionaries), in two low-priority processes."""

    def __init__(self, folder: Path, cases: Sequence[Any]) -> None:
        """Start the trials in `folder`, unless another process has started them there."""
        self.halves = [folder / f"half_{i}" for i in (0, 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            (folder / "begun").mkdir()
        except FileExistsError:
            return
        guard = build_guard(folder)
        for i, half in enumerate(self.halves):
            self._processes.append(self._start(guard, cases[i::2], half))

    def _start(self, guard: Path, cases: Sequence[Any], output: Path) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "tests.nightly.pretend_cuda"]
        command = [*program, str(guard), json.dumps(cases)]
        process = subprocess.Popen(
            ["nice", "sh", "-c", SHELL, str(output), *command], cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        output.with_suffix(".pid").write_text(str(process.pid))
        return process

    def outcomes(self) -> Outcomes:
        """Wait for all trials; return their outcomes in the order of the cases."""
        outcomes = []
        for half in self.halves:
            while not half.with_suffix(".rc").exists():
                time.sleep(0.1)
            status = half.with_suffix(".rc").read_text().strip()
            assert status == "0", half.with_suffix(".err").read_text()
            outcomes.append([json.loads(line) for line in half.read_text().splitlines()])
        return [x for pair in zip_longest(*outcomes) for x in pair if x is not None]
