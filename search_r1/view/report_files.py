"""`report.html` and `report.md`, beside the files of the run that they are of.

`report.html` is the page of `search-r1 view` with the report in front; `report.md` says the same in
text.
"""

from __future__ import annotations

import html
import logging
import re
import sqlite3
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from search_r1.plain import CONTROLS
from search_r1.view.export import write_export
from search_r1.view.report import Report, report
from search_r1.view.run import Run
from verl.errors import UserError
from verl.files import whole_file

logger = logging.getLogger(__name__)

MOST_TRAJECTORIES = 60
"""Those that the file has beside the examples."""
HIDDEN = re.compile(rf"{CONTROLS.pattern}|[\u200b-\u200d\u2060-\u2065]")
"""Characters that act instead of being seen, or that nobody sees."""
INTERVALS = "Answers of the validation; in brackets 95 % intervals, by resampling questions"


def write_report(folder: Path) -> None:
    """Write `report.html` and `report.md` beside a run's `metrics.jsonl`; a run never fails by it.

    Of trajectories, the first and the last step's are read: it takes seconds.
    """
    try:
        with tempfile.TemporaryDirectory() as index:
            run = Run(folder, Path(index), only=_ends)
            run.refresh()
            if not run.metrics.rows:
                return
            made = report(run)
            write_export([run], folder / "report.html", MOST_TRAJECTORIES, [asdict(made)])
            with whole_file(folder / "report.md") as part:
                part.write_text(as_markdown(made), encoding="utf-8", errors="replace")
    except (OSError, UserError, sqlite3.Error) as error:
        logger.warning("no report.html of %s: %s", folder, error)
        return
    logger.info("report: %s (and report.md)", folder / "report.html")


def _ends(steps: Collection[int]) -> set[int]:
    """The first and the last of a kind's steps."""
    return {min(steps), max(steps)} if steps else set()


def as_markdown(made: Report) -> str:
    """The report as text; words of a trajectory stand in indented code, where nothing acts."""
    parts = [f"# {_inline(made.title)}", *(f"- {k}: {_inline(v)}" for k, v in made.facts), ""]
    parts += ["## Evaluation", ""]
    if made.rows:
        parts += [*_lines(made.heads, made.rows), "", f"{INTERVALS}.", ""]
    else:
        parts += ["There was no validation (`trainer.test_freq`); `search-r1 evaluate` measures "
                  "the model.", ""]  # fmt: skip
    parts += ["## What to try next", "", *(f"- {line}" for line in made.advice), ""]
    parts += ["## Cost", "", *_lines(["", ""], made.cost), ""]
    if made.examples:
        parts += ["## Before and after", ""]
    for one in made.examples:
        parts += [_code(f"{one.question}\naccepted: {one.accepted}"), ""]
        for when, row in (("before", one.before), ("after", one.after)):
            if row is not None:
                parts += [f"{when}, score {row['score']}:", "", _code(_spoken(row)), ""]
    return "\n".join([*parts, "Curves, all options and trajectories: `report.html`.", ""])


def _spoken(row: Mapping[str, Any]) -> str:
    return "".join(one["text"] for one in row["segments"] if one["origin"] != "prompt").strip()


def _code(text: str) -> str:
    """A block that no text ends."""
    return "\n".join(f"    {_seen(line)}" for line in text.splitlines() or [""])


def _inline(text: str) -> str:
    """A text within a line of Markdown."""
    plain = html.escape(_seen(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*_\[\]|!])", r"\\\1", plain)


def _seen(text: str) -> str:
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    cells = [[_inline(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*heads], ["---"] * len(heads), *cells)]
