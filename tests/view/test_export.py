"""The exported file, which opens without a server."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from search_r1.view.app import PAGE
from search_r1.view.export import MODULES, page, snapshot, write_export
from search_r1.view.run import Run
from tests.view import runs


def snapshot_of(text: str) -> dict:
    [data] = re.findall(r'<script type="application/json" id="snapshot">(.*?)</script>', text)
    return json.loads(data)


def test_the_file_contains_what_the_page_requests(run: Run, tmp_path: Path) -> None:
    """Curves, and each selected trajectory as the server returns it."""
    path = tmp_path / "run.html"
    size = write_export([run], path, 20)
    text = path.read_text(encoding="utf-8")
    assert size == len(text) and (data := snapshot_of(text))
    assert data["curves"]["actor/entropy"] == [[[1, 2], [1.0, 0.5]]]
    assert len(data["rows"][0]) == len(data["trajectories"][0]) == 7
    first = run.trajectory("train", 1, 0)
    assert data["trajectories"][0][0] == json.loads(json.dumps(first))


def test_only_the_pages_script_can_run(run: Run) -> None:
    """Hostile texts stay within the data; the policy allows script and style by their hashes."""
    text = page(snapshot([run], 20))
    assert snapshot_of(text)["rows"][0][-2]["question"] == runs.HOSTILE
    assert "<img" not in text and text.count("<script") == 2 == text.count("</script>")
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    for tag, name in (('script type="module"', "script-src"), ("style", "style-src")):
        [inside] = re.findall(f"<{tag}>(.*?)</", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "src=" not in text.replace("src=x", "")


def test_every_module_is_in_the_file_before_those_that_need_it() -> None:
    """No module is missing, and no top-level name is defined twice."""
    assert {path.stem for path in PAGE.glob("*.js")} == set(MODULES)
    names: list[str] = []
    for index, name in enumerate(MODULES):
        text = (PAGE / f"{name}.js").read_text(encoding="utf-8")
        needed = re.findall(r'from "\./(\w+)\.js"', text)
        assert set(needed) <= set(MODULES[:index]), name
        names += re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text,
                            re.MULTILINE)  # fmt: skip
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


def test_selected_trajectories_are_spread(folder: Path, open_run: Callable[[Path], Run]) -> None:
    """As many as requested, including the first and the last; none if none is requested."""
    for step in range(3, 40):
        runs.write_rollouts(folder, step, [(runs.dialogue("Q?", ["x"], "y"), 0.0)])
    run = open_run(folder)
    steps = [row["step"] for row in snapshot([run], 5)["rows"][0]]
    assert len(steps) == 5 and (steps[0], steps[-1]) == (1, 39)
    assert snapshot([run], 1)["rows"][0][0]["step"] == 1 and snapshot([run], 0)["rows"] == [[]]
