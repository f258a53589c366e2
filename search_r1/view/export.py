"""Export runs as one HTML file that opens without a server: the page and the data it requests.

Browsers do not load modules from files, so the page's modules become one script. The file's content
security policy allows this script and the style by their hashes, and nothing else.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from search_r1.view.app import PAGE, Runs
from search_r1.view.index import ROW_COLUMNS
from search_r1.view.run import Run
from verl.files import atomic_write

MODULES = ("elements", "ask", "chart", "curves", "config", "trajectories", "replay", "trajectory",
           "question", "report", "main")  # fmt: skip
"""The page's modules, each after those it imports."""
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=async|function|const|class)", re.MULTILINE)
MAX_POINTS = 300
TrajectoryKey = tuple[str, int, int]
"""Kind, step and line of a trajectory."""


def write_export(
    runs: Sequence[Run], path: Path, max_trajectories: int,
    reports: Sequence[Mapping[str, Any]] = (),
) -> int:  # fmt: skip
    """Write the file and return its size in bytes.

    Reports (one per run, or none) are shown first; their examples come in addition to
    `max_trajectories` of each run.
    """
    text = page(snapshot(runs, max_trajectories, reports))
    with atomic_write(path) as part:
        return part.write_text(text, encoding="utf-8", errors="replace")


def snapshot(
    runs: Sequence[Run], max_trajectories: int, reports: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the data that the page can request, by the names of the requests."""
    data = Runs(runs)
    required: list[set[TrajectoryKey]] = [set() for _ in runs]
    for keys, report in zip(required, reports, strict=False):
        for example in report["examples"]:
            shown = [row for row in (example["before"], example["after"]) if row]
            keys |= {(row["kind"], row["step"], row["line"]) for row in shown}
    rows = [
        select_rows(run, max_trajectories, keys) for run, keys in zip(runs, required, strict=True)
    ]
    return ({"report": list(reports)} if reports else {}) | {
        "runs": data.summaries(),
        "metrics": data.names(),
        "curves": data.curves(data.names(), MAX_POINTS),
        "alarms": data.alarms(),
        "config": data.config(),
        "rows": rows,
        "trajectories": [
            [run.trajectory(row["kind"], row["step"], row["line"]) for row in of_run]
            for run, of_run in zip(runs, rows, strict=True)
        ],
    }


def select_rows(
    run: Run, max_trajectories: int, required: Collection[TrajectoryKey] = ()
) -> list[dict[str, Any]]:
    """Return index rows: the `required` ones, and at most `max_trajectories` at even distances."""
    count = run.index.summary()["count"]
    num = min(max_trajectories, count)
    chosen = {i * (count - 1) // max(1, num - 1) for i in range(num)}
    rows = run.index.db.execute(f"SELECT {ROW_COLUMNS} FROM trajectories ORDER BY step, kind, line")
    return [
        dict(row)
        for number, row in enumerate(rows)
        if number in chosen or (row["kind"], row["step"], row["line"]) in required
    ]


def page(data: dict[str, Any]) -> str:
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    modules = [(PAGE / f"{name}.js").read_text("utf-8") for name in MODULES]
    script = "".join(EXPORT.sub("", IMPORT.sub("", module)) for module in modules)
    policy = (f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
              "base-uri 'none'; form-action 'none'")  # fmt: skip
    # "<" is escaped, so that no text of a trajectory can close the script element.
    json_text = orjson.dumps(data).decode().replace("<", r"\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="snapshot">{json_text}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    start, end = html.index("<!-- files -->"), html.index("<!-- end of files -->")
    return html[:start] + head + html[end:]


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
