"""Trials on pretended cards, in processes of their own: `machine` changes torch for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.pretend_cuda.machine import build_guard

ROOT = Path(__file__).resolve().parents[2]
Outcomes = list[dict[str, Any]]


class Trials:
    """Cases (`trial.Case` as dictionaries) under way, in two processes that give way to others."""

    def __init__(self, cases: Sequence[Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        guard = build_guard(Path(self.folder.name))
        self.halves = [self._start(guard, cases[i::2], f"half_{i}") for i in (0, 1)]

    def _start(
        self, guard: Path, cases: Sequence[Any], name: str
    ) -> tuple[subprocess.Popen[bytes], Path]:
        said = Path(self.folder.name) / name
        with said.open("wb") as out, said.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen(
                ["nice", sys.executable, "-m", "tests.pretend_cuda", str(guard), json.dumps(cases)],
                cwd=ROOT, stdout=out, stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return process, said

    def outcomes(self) -> Outcomes:
        """The outcome of each case; waits for the last."""
        found = []
        for process, said in self.halves:
            assert process.wait() == 0, said.with_suffix(".err").read_text()
            found.append([json.loads(line) for line in said.read_text().splitlines()])
        return [one for pair in zip_longest(*found) for one in pair if one is not None]

    def stop(self) -> None:
        """End what is still under way."""
        for process, _ in self.halves:
            process.kill()
            process.wait()
        self.folder.cleanup()
