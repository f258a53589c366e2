"""One check in this process: `python -m scripts.gpu_checks NAME DEVICE OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.table import CHECKS

if __name__ == "__main__":
    name, device, out = sys.argv[1:]
    folder = Path(out).absolute()
    with Report(folder / f"{name}.json", device, folder / name) as report:
        CHECKS[name].run(report)
    sys.exit(1 if report.failures else 0)
