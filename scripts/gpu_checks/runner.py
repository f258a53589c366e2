"""Runs checks one after another, each in its own process with a time limit."""

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
"""Seconds that a stopped check may take to stop the processes it started."""


@dataclass(frozen=True)
class Row:
    """The result of one check; `ok` is None if it was skipped."""

    name: str
    ok: bool | None
    seconds: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None
    is_missing: bool = False
    """Whether the check was skipped for lack of time, so that the run is incomplete."""

    def line(self) -> str:
        """Return the row as one line of JSON."""
        return json.dumps(asdict(self))


def run_all(
    checks: Sequence[Check], device: str, out: Path, seconds: float, interpreter: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield a row per check as it ends; skips checks that do not fit the rest of `seconds`."""
    end = time.monotonic() + seconds
    for check in checks:
        left = end - time.monotonic()
        if left < check.seconds:
            reason = f"no time: needs about {check.seconds:.0f} s, {max(left, 0):.0f} s are left"
            yield Row(check.name, None, 0.0, skipped=reason, is_missing=True)
        else:
            yield run_one(check, device, out, min(check.limit, left), interpreter)


def run_one(
    check: Check, device: str, out: Path, limit: float, interpreter: Sequence[str] = ()
) -> Row:
    """Run one check in its own process for at most `limit` seconds."""
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
    """Terminate a process and its descendants; after `GRACE_S` kill those that are left."""
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
    content: dict[str, Any] = {"figures": {}, "failures": [], "skipped": None, "done": False}
    if result.exists():
        content = json.loads(result.read_text())
    errors = list(content["failures"])
    if not content["done"]:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors.append(f"{ending}; its log ends: {lines[-1] if lines else '(empty)'}")
    is_skipped = content["skipped"] is not None and not errors
    return Row(
        check.name, None if is_skipped else not errors, round(seconds, 1), content["figures"],
        "; ".join(errors) or None, content["skipped"],
    )  # fmt: skip
