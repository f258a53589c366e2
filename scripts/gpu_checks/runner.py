"""Runs checks one after the other, each in a process with a limit, whatever the others did."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.gpu_checks.table import Check

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0
"""What a check that is stopped may take to stop what it started."""


@dataclass(frozen=True)
class Row:
    """What is known of one check; `ok` is None for one that was left out."""

    name: str
    ok: bool | None
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None
    is_missing: bool = False
    """Left out for want of time: the run is not complete."""

    def line(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(asdict(self))


def run_all(
    checks: Sequence[Check], device: str, out: Path, seconds: float, interpreter: Sequence[str] = ()
) -> Iterator[Row]:
    """A row a check, as it ends; one that needs more than is left of `seconds` is left out."""
    end = time.monotonic() + seconds
    for check in checks:
        left = end - time.monotonic()
        if left < check.seconds:
            why = f"no time: it needs about {check.seconds:.0f} s of which {max(left, 0):.0f} s are"
            yield Row(check.name, None, 0.0, skipped=f"{why} left", is_missing=True)
        else:
            yield run_one(check, device, out, min(check.limit, left), interpreter)


def run_one(
    check: Check, device: str, out: Path, limit: float, interpreter: Sequence[str] = ()
) -> Row:
    """Run one check in a process of its own for at most `limit` seconds."""
    command = [*(interpreter or (sys.executable, "-m", "scripts.gpu_checks"))]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    result, log = out / f"{check.name}.json", out / f"{check.name}.log"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, check.name, device, str(out)], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                stop_tree(process.pid)
                process.wait()
    ending = f"killed after {limit:.0f} s" if code is None else f"ended with status {code}"
    return _row(check, time.monotonic() - began, ending, result, log)


def stop_tree(pid: int) -> None:
    """End a process and all below it, by force what is left after `GRACE_S`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _row(check: Check, seconds: float, ending: str, result: Path, log: Path) -> Row:
    found: dict[str, Any] = {"figures": {}, "failures": [], "skipped": None, "done": False}
    if result.exists():
        found = json.loads(result.read_text())
    errors = list(found["failures"])
    if not found["done"]:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors.append(f"{ending}; its log ends: {lines[-1] if lines else '(empty)'}")
    is_skipped = found["skipped"] is not None and not errors
    return Row(
        check.name, None if is_skipped else not errors, round(seconds, 1), found["figures"],
        "; ".join(errors) or None, found["skipped"],
    )  # fmt: skip
