"""Stores results as JSON lines, and writes them as Markdown to docs/evidence/retrieval.md."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

from benchmarks.retrieval.figures import Figure, format_number

DOCS = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "retrieval.md"
DETAILS = (": stage ", ": processor time", ": batch", ": p50", "resident set")
"""Parts of the names of figures that are left out of the documentation."""
BEGIN = "<!-- results: begin (written by benchmarks.retrieval --write-docs) -->"
END = "<!-- results: end -->"
PACKAGES = ("faiss-cpu", "torch", "bm25s", "transformers", "datasets", "fastapi", "uvicorn")


@dataclass(frozen=True)
class PartResult:
    """The result of a part that was measured completely."""

    part: str
    title: str
    figures: list[Figure]
    settings: dict[str, Any]
    """Settings of the measurement; only results with equal settings are comparable."""
    machine: str
    is_trial: bool = False
    """Whether it was made with small counts (`--trial`); excluded from the documentation."""

    def to_line(self) -> str:
        """Return the result as one JSON line."""
        figures = [figure.to_json() for figure in self.figures]
        return json.dumps({**vars(self), "figures": figures}, ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str) -> "PartResult":
        """Parse a line that `to_line` returned."""
        row = json.loads(line)
        return cls(**{**row, "figures": [Figure.from_json(f) for f in row["figures"]]})


def load(path: Path) -> dict[str, PartResult]:
    """Load the latest result of each part."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    results = [PartResult.from_line(line) for line in lines]
    return {result.part: result for result in results}


def append(path: Path, result: PartResult) -> None:
    """Append a part's result to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(result.to_line() + "\n")


def essential(result: PartResult) -> PartResult:
    """Return the result without the detailed figures, which remain in the JSON lines."""
    kept = [f for f in result.figures if not any(word in f.name for word in DETAILS)]
    return replace(result, figures=kept)


def table(result: PartResult) -> str:
    """Return the result as a Markdown section with a table."""
    head = f"### {result.part}\n\n{result.title}\n\n| figure | value | target | note |\n"
    rows = [
        f"| {f.name} | {format_number(f.value)} {f.unit} | {f.target} | {f.note} |"
        for f in result.figures
    ]
    return head + "| --- | ---: | --- | --- |\n" + "\n".join(rows) + "\n"


def verdicts(results: Iterable[PartResult]) -> str:
    """Return the number of targets that are met, and a list of the missed ones."""
    with_target = [(r, f) for r in results for f in r.figures if f.met is not None]
    missed = [
        f"- {r.part}, {f.name}: {format_number(f.value)} {f.unit} ({f.target})"
        for r, f in with_target
        if not f.met
    ]
    num_met = len(with_target) - len(missed)
    return "\n".join([f"{num_met} of {len(with_target)} targets met.", *missed])


def machine() -> str:
    """Describe the machine: cores, processor, memory and the versions of relevant packages."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = psutil.virtual_memory().total / 2**30
    installed = {package.metadata["Name"]: package.version for package in distributions()}
    packages = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB; Python {python}, {packages}"


def write_docs(results: Mapping[str, PartResult], path: Path = DOCS) -> None:
    """Replace the text between the markers of the page by the results.

    Raises ValueError if there are no results, if some are from `--trial`, or without both markers.
    """
    trials = [part for part, result in results.items() if result.is_trial]
    if trials or not results:
        got = f"results of --trial ({', '.join(trials)})" if trials else "no results"
        raise ValueError(
            f"got {got}; expected full measurements: run without --trial into another "
            "--results file"
        )
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, end_marker, after = rest.partition(END)
    if not end_marker:
        raise ValueError(f"{path} lacks {BEGIN!r} or {END!r}; expected both markers: restore them")
    machines = "\n".join(dict.fromkeys(f"Machine: {r.machine}." for r in results.values()))
    body = "\n\n".join(
        [machines, verdicts(results.values()), *(table(essential(r)) for r in results.values())]
    )
    path.write_text(f"{before}{BEGIN}\n\n{body}\n{END}{after}", encoding="utf-8")
