"""Runs one check in this process: `python -m scripts.gpu_checks NAME DEVICE OUT`."""

import sys
from pathlib import Path

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.table import CHECKS

if __name__ == "__main__":
    name, device, out = sys.argv[1:]
    report = Report(Path(out).absolute(), name, device)
    with report.part():
        CHECKS[name].run(report)
    report.write(done=True)
