"""Results on disk and on paper: JSON lines, Markdown tables, docs/evidence/retrieval.md."""

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

from benchmarks.retrieval.figures import Figure, number

DOCS = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "retrieval.md"
DETAILS = (": stage ", ": processor time", ": batch", ": p50", "resident set")
"""Figures that a page can do without."""
BEGIN = "<!-- results: begin (written by benchmarks.retrieval --write-docs) -->"
END = "<!-- results: end -->"
PACKAGES = ("faiss-cpu", "torch", "bm25s", "transformers", "datasets", "fastapi", "uvicorn")


@dataclass(frozen=True)
class PartResult:
    """A part that was measured to its end."""

    part: str
    title: str
    figures: list[Figure]
    settings: dict[str, Any]
    """What the measurement was made with; results of other settings do not mix."""
    machine: str
    is_trial: bool = False
    """Made with small counts, to see that all works; never for the documentation."""

    def to_line(self) -> str:
        """One JSON line."""
        figures = [figure.to_json() for figure in self.figures]
        return json.dumps({**vars(self), "figures": figures}, ensure_ascii=False)

    @classmethod
    def from_line(cls, line: str) -> "PartResult":
        """The part that `to_line` wrote."""
        row = json.loads(line)
        return cls(**{**row, "figures": [Figure.from_json(f) for f in row["figures"]]})


def load(path: Path) -> dict[str, PartResult]:
    """The last result of every part."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    results = [PartResult.from_line(line) for line in lines]
    return {result.part: result for result in results}


def append(path: Path, result: PartResult) -> None:
    """Add a part to the file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(result.to_line() + "\n")


def essential(result: PartResult) -> PartResult:
    """A part without the figures that explain the others; those stay in the JSON lines."""
    kept = [f for f in result.figures if not any(word in f.name for word in DETAILS)]
    return replace(result, figures=kept)


def table(result: PartResult) -> str:
    """A part as a Markdown table."""
    head = f"### {result.part}\n\n{result.title}\n\n| figure | value | bar | note |\n"
    rows = [
        f"| {f.name} | {number(f.value)} {f.unit} | {f.bar} | {f.note} |" for f in result.figures
    ]
    return head + "| --- | ---: | --- | --- |\n" + "\n".join(rows) + "\n"


def verdicts(results: Iterable[PartResult]) -> str:
    """How many bars are met, and those that are not."""
    judged = [(r, f) for r in results for f in r.figures if f.met is not None]
    missed = [
        f"- {r.part}, {f.name}: {number(f.value)} {f.unit} ({f.bar})"
        for r, f in judged
        if not f.met
    ]
    return "\n".join([f"{len(judged) - len(missed)} of {len(judged)} bars met.", *missed])


def machine() -> str:
    """Processor, cores, memory and the packages that do the work."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = psutil.virtual_memory().total / 2**30
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    packages = ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB; Python {python}, {packages}"


def write_docs(results: Mapping[str, PartResult], path: Path = DOCS) -> None:
    """Replace what stands between the markers by the results; raises ValueError for a trial's."""
    trials = [part for part, result in results.items() if result.is_trial]
    if trials or not results:
        raise ValueError(
            f"the results have trials ({', '.join(trials)}) or nothing; expected full "
            "measurements: run without --trial into another --results file"
        )
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{path} lacks {BEGIN!r} or {END!r}; expected both markers: restore them")
    machines = "\n".join(dict.fromkeys(f"Machine: {r.machine}." for r in results.values()))
    body = "\n\n".join(
        [machines, verdicts(results.values()), *(table(essential(r)) for r in results.values())]
    )
    path.write_text(f"{before}{BEGIN}\n\n{body}\n{END}{after}", encoding="utf-8")
