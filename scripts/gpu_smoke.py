"""`python -m scripts.gpu_smoke`: checks in some minutes whether training works on this machine.

Each check runs in its own process with a time limit; a failed check does not stop the others.
Standard output has one line of JSON per check, standard error a table at the end. Exit status 0: no
check failed, and none was skipped for lack of time.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.gpu_checks.report import NOTE
from scripts.gpu_checks.runner import Row, run_all
from scripts.gpu_checks.table import CHECKS

MARKS = {True: "passed", False: "FAILED", None: "skipped"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="gpu_smoke", description=__doc__.splitlines()[0])
    names: dict[str, Any] = {"nargs": "+", "action": "extend", "choices": CHECKS, "metavar": "NAME"}
    parser.add_argument("--only", **names, help="run only these, in this order")
    parser.add_argument("--skip", **names, default=[], help="leave these out")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_smoke"), help="folder of logs")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit for all checks")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser.parse_args(arguments)


def summary(rows: Sequence[Row], console: Console) -> None:
    """Print the results as a table."""
    table = Table("check", "", "seconds", "")
    for row in rows:
        remark = row.error or row.skipped or str(row.figures.get(NOTE, ""))
        table.add_row(row.name, MARKS[row.ok], f"{row.seconds:.0f}", remark)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse(arguments)
    names = dict.fromkeys(options.only or CHECKS)  # each once, in the order of the command
    chosen = [CHECKS[name] for name in names if name not in options.skip]
    if options.list:
        for check in chosen:
            sys.stdout.write(f"{check.name:15} {check.seconds:4.0f} s  {check.about}\n")
        return 0
    from verl.training.devices import device_type  # noqa: PLC0415 - torch takes seconds to import

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for row in run_all(chosen, device_type(options.device), out, 60 * options.minutes):
        rows.append(row)
        sys.stdout.write(row.line() + "\n")
        sys.stdout.flush()
    summary(rows, Console(stderr=True))
    return 0 if all(row.ok is not False and not row.is_missing for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
