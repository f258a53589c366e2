"""One HTML file over runs that opens without a server: the page, and what it would have asked for.

The page's modules become one script, since a browser loads no modules from files. The policy of the
file allows that script and its style by their hashes, and nothing else.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from search_r1.view.app import PAGE, Runs
from search_r1.view.index import SHOWN
from search_r1.view.run import Run
from verl.files import atomic_write

MODULES = ("elements", "ask", "chart", "curves", "config", "trajectories", "replay", "trajectory",
           "question", "report", "main")  # fmt: skip
"""In the order in which each needs only those before it."""
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=async|function|const|class)", re.MULTILINE)
MOST_POINTS = 300
Place = tuple[str, int, int]
"""Kind, step and line of a trajectory."""


def write_export(
    runs: Sequence[Run], path: Path, most: int, reports: Sequence[Mapping[str, Any]] = ()
) -> int:
    """Write the file with `most` trajectories of a run, and reports first; its size in bytes."""
    text = page(snapshot(runs, most, reports))
    with atomic_write(path) as part:
        return part.write_text(text, encoding="utf-8", errors="replace")


def snapshot(
    runs: Sequence[Run], most: int, reports: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """What the page may ask for: by the name of the question and, of a trajectory, its place."""
    asked, none = Runs(runs), [set[Place]()] * len(runs)
    shown = [[row for e in r["examples"] for row in (e["before"], e["after"])] for r in reports]
    named = [{(o["kind"], o["step"], o["line"]) for o in rows if o} for rows in shown] or none
    rows = [chosen(run, most, own) for run, own in zip(runs, named, strict=True)]
    return ({"report": list(reports)} if reports else {}) | {
        "runs": asked.about(),
        "metrics": asked.names(),
        "curves": asked.curves(asked.names(), MOST_POINTS),
        "alarms": asked.alarms(),
        "config": asked.config(),
        "rows": rows,
        "trajectories": [
            [run.trajectory(row["kind"], row["step"], row["line"]) for row in own]
            for run, own in zip(runs, rows, strict=True)
        ],
    }


def chosen(run: Run, most: int, named: Collection[Place] = ()) -> list[dict[str, Any]]:
    """At most `most` trajectories at even distances, from the first step to the last; and those
    that are named."""
    count = run.index.report()["count"]
    num = min(most, count)
    places = {i * (count - 1) // max(1, num - 1) for i in range(num)}
    rows = run.index.db.execute(f"SELECT {SHOWN} FROM trajectories ORDER BY step, kind, line")
    return [
        dict(row)
        for number, row in enumerate(rows)
        if number in places or (row["kind"], row["step"], row["line"]) in named
    ]


def page(data: dict[str, Any]) -> str:
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    modules = [(PAGE / f"{name}.js").read_text("utf-8") for name in MODULES]
    script = "".join(EXPORT.sub("", IMPORT.sub("", module)) for module in modules)
    policy = (f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
              "base-uri 'none'; form-action 'none'")  # fmt: skip
    # "<" is escaped, so that no text of a trajectory can end the element.
    held = orjson.dumps(data).decode().replace("<", r"\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="snapshot">{held}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    start, end = html.index("<!-- files -->"), html.index("<!-- end of files -->")
    return html[:start] + head + html[end:]


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
