"""Replaces `scripts.gpu_checks` in tests of its runner; a check's name is its behaviour."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_checks.report import Report, Skipped


def run(name: str, report: Report) -> None:
    match name:
        case "bounds":
            report.expect("small", 0.1, below=0.5)
            report.expect("large", 0.7, below=0.5)
            report.expect("nan", float("nan"), below=0.5)
        case "raises":
            with report.part("first"):
                raise ValueError("a part")
            report.record("second", "went on")
            raise RuntimeError("the rest")
        case "hangs":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            report.record("child", child.pid)
            time.sleep(600)
        case "dies":
            os.write(1, b"last words")
            os._exit(3)
        case "skips":
            raise Skipped("no card")
        case "works":
            (report.folder / "made once").mkdir()


if __name__ == "__main__":
    report = Report(Path(sys.argv[3]), sys.argv[1], sys.argv[2])
    report.record("device", report.device)
    with report.part():
        run(sys.argv[1], report)
    report.write(done=True)
