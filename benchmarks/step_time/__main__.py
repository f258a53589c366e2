"""Compare predicted with measured step times: `python -m benchmarks.step_time`. Prints Markdown.

Each finished configuration is a line of `--out`; an interrupted run continues with the missing
ones. Several processes may measure at the same time, each with its own `--part` of `--parts`,
because engines and searches only sleep. The process that finishes last measures training for all
configurations. Engine and trainer rates are fitted to the first `--calibrate` configurations; the
others are predicted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.step_time.cases import draw_cases
from benchmarks.step_time.comparing import recorded_dialogues, report
from benchmarks.step_time.measuring import measure, running_rank, train_s


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Return the measurements of each configuration by its number, merged over the file's lines."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        row = json.loads(line)
        rows.setdefault(row["number"], {}).update(row)
    return rows


def write(path: Path, number: int, row: Mapping[str, Any]) -> None:
    """Append one line; safe while other processes append to the same file."""
    with path.open("a") as file:
        file.write(json.dumps({"number": number, **row}) + "\n")


def main() -> None:
    """Measure the missing configurations; print the report once all of them are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/step_time.jsonl"))
    parser.add_argument("--count", type=int, default=44)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--calibrate", type=int, default=8)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    cases, done = draw_cases(options.count), read(options.out)
    for i in range(options.part, len(cases), options.parts):
        if i not in done:
            write(options.out, i, {"case": asdict(cases[i]), **measure(cases[i])})
    rows = read(options.out)
    if len(rows) < len(cases):
        return  # Other parts are not finished. Training is measured after them, without their load.
    with running_rank() as worker:
        train_s(worker, recorded_dialogues(rows[0]))  # warm-up
        for i in [i for i in range(len(cases)) if "train_s" not in rows[i]]:
            write(options.out, i, {"train_s": train_s(worker, recorded_dialogues(rows[i]))})
    rows = read(options.out)
    print(report(cases, [rows[i] for i in range(len(cases))], options.calibrate))  # noqa: T201


if __name__ == "__main__":
    main()
