"""example/recipes/runs: logs of the recipes that were run, and what their page says of them."""

import re
from pathlib import Path

import pytest

from example.recipes import log
from tests.runs.written import add_metrics

PAGE = (log.RUNS.parent / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"\| (0\.\d+), (0\.\d+)[^|]*\| \[log\]\(runs/(\w+)\.csv\)", PAGE)


def test_a_log_is_what_the_run_wrote(tmp_path: Path) -> None:
    """A step without a validation has an empty cell."""
    add_metrics(tmp_path, 0, **{"val/em": 0.25, "val/env/valid_searches": 1.0})
    add_metrics(tmp_path, 1, **{"critic/score/mean": 1 / 3, "timing_s/step": 2.0})
    read = log.read_run(tmp_path)
    log.write_log(read, tmp_path / "log.csv")
    log.draw(read, tmp_path / "curve.png")
    assert (tmp_path / "log.csv").read_text().splitlines()[1:] == [
        "0,,,0.25,1.0,",
        "1,0.3333,,,,2.0",
    ]
    again = log.read_log(tmp_path / "log.csv")
    assert [row["em"] for row in again] == [0.25, None]
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize(("before", "after", "name"), ROWS, ids=[row[-1] for row in ROWS])
def test_the_page_says_what_the_log_has(before: str, after: str, name: str) -> None:
    """The first and the last EM of held-out questions."""
    scores = [row["em"] for row in log.read_log(log.RUNS / f"{name}.csv") if row["em"] is not None]
    assert [f"{score:.3f}" for score in (scores[0], scores[-1])] == [before, after]


def test_each_log_has_a_row_and_a_curve() -> None:
    """None is left without a word."""
    names = {path.stem for path in log.RUNS.glob("*.csv")}
    assert names == {name for *_, name in ROWS} == {path.stem for path in log.RUNS.glob("*.png")}
