"""Stops trials on simulated GPUs. It does not import torch, since every session uses it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path


def stop(folder: Path) -> None:
    """Kill the trials that still run in `folder`, and remove it."""
    for pid in folder.glob("*.pid"):
        if not pid.with_suffix(".rc").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
