"""Trials on pretended cards, in processes of their own: `machine` changes torch for good."""

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

from tests.pretend_cuda.machine import build_guard

ROOT = Path(__file__).resolve().parents[2]
Outcomes = list[dict[str, Any]]


SHELL = '"$@" > "$0" 2> "$0.err"; echo $? > "$0.part"; mv "$0.part" "$0.rc"'
"""Runs a command for what it says and its status, which is there when it has ended."""


class Trials:
    """Cases (`trial.Case` as dictionaries) under way, in two processes that give way to others."""

    def __init__(self, folder: Path, cases: Sequence[Any]) -> None:
        """In `folder`; where another process has begun them there, they are the same ones."""
        self.halves = [folder / f"half_{i}" for i in (0, 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            (folder / "begun").mkdir()
        except FileExistsError:
            return
        guard = build_guard(folder)
        for i, half in enumerate(self.halves):
            self._processes.append(self._start(guard, cases[i::2], half))

    def _start(self, guard: Path, cases: Sequence[Any], said: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.pretend_cuda", str(guard), json.dumps(cases)]
        process = subprocess.Popen(
            ["nice", "sh", "-c", SHELL, str(said), *command], cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        said.with_suffix(".pid").write_text(str(process.pid))
        return process

    def outcomes(self) -> Outcomes:
        """The outcome of each case; waits for the last."""
        found = []
        for half in self.halves:
            while not half.with_suffix(".rc").exists():
                time.sleep(0.1)
            ended = half.with_suffix(".rc").read_text().strip()
            assert ended == "0", half.with_suffix(".err").read_text()
            found.append([json.loads(line) for line in half.read_text().splitlines()])
        return [one for pair in zip_longest(*found) for one in pair if one is not None]
