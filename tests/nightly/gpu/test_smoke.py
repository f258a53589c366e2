"""Everything that `scripts.gpu_smoke` checks, on this machine's card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.gpu
@pytest.mark.timeout(3600)
def test_this_machine_trains(tmp_path: Path) -> None:
    """No check fails, and none is left out but those that need a second card."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_smoke", "--device", "cuda", "--out", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f"{row['name']}: {row['error']}" for row in rows if row["ok"] is False] == []
    assert done.returncode == 0
