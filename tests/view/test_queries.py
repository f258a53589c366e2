"""Filters of the index against the same filters in Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.view.index import TrajectoryQuery, find_trajectories, question_history
from search_r1.view.run import Run
from tests.runs import written as runs

Row = dict[str, Any]
CASES: list[tuple[dict[str, Any], Callable[[Row], bool]]] = [
    ({}, lambda r: True),
    ({"words": "france CAPITAL"}, lambda r: "capital of France" in r["question"]),
    ({"words": "rome"}, lambda r: r["answer"] == "Rome"),
    ({"words": "italy"}, lambda r: r["queries"] == "Italy"),
    ({"words": "100% _real_"}, lambda r: "100%" in r["question"]),
    ({"words": "NIÑO"}, lambda r: "Niño" in (r["answer"] or "")),
    ({"words": "r_me"}, lambda r: False),
    ({"words": "'; DROP TABLE files; --"}, lambda r: False),
    ({"kind": "val"}, lambda r: r["kind"] == "val"),
    ({"status": "answered"}, lambda r: r["status"] == "answered"),
    ({"source": "nq"}, lambda r: True),
    ({"group": "2/0"}, lambda r: r["group"] == "2/0"),
    ({"uid": "train.parquet#1"}, lambda r: r["uid"] == "train.parquet#1"),
    ({"outcome": "given"}, lambda r: r["is_given"]),
    ({"outcome": "missed"}, lambda r: r["is_found"] and not r["is_given"]),
    *(
        (
            {"outcome": outcome},
            lambda r, counts=counts: (
                not (r["is_found"] or r["is_given"]) and r["searches"] in counts
            ),
        )
        for outcome, counts in {
            "no_search": [0],
            "one_search": [1],
            "not_found": range(2, 99),
        }.items()
    ),
    ({"outcome": "known"}, lambda r: not r["is_found"] and r["is_given"]),
    ({"step_from": 2}, lambda r: r["step"] >= 2),
    ({"step_to": 1, "searches_from": 1}, lambda r: r["step"] <= 1 and r["searches"] >= 1),
    ({"score_from": 0.5, "score_to": 0.9}, lambda r: 0.5 <= r["score"] <= 0.9),
]


@pytest.fixture
def rows(run: Run) -> list[Row]:
    return find_trajectories(run.index, TrajectoryQuery())["rows"]


@pytest.mark.parametrize(("filters", "is_match"), CASES, ids=[str(filters) for filters, _ in CASES])
def test_a_filter_finds_the_matching_rows(
    run: Run, rows: list[Row], filters: dict[str, Any], is_match: Callable[[Row], bool]
) -> None:
    """Count and rows equal those of the filter in Python, in the default order."""
    found = find_trajectories(run.index, TrajectoryQuery(**filters))
    assert found["rows"] == [row for row in rows if is_match(row)]
    assert found["count"] == len(found["rows"])


def test_pages_divide_the_matches(run: Run, rows: list[Row]) -> None:
    """In each order every row is on one page; a page number beyond the last gives the last."""
    orders: dict[str, Callable[[Row], Any]] = {
        "newest": lambda r: -r["step"], "oldest": lambda r: r["step"],
        "score_low": lambda r: r["score"], "score_high": lambda r: -r["score"],
        "searches_most": lambda r: -r["searches"],
        "log_prob_low": lambda r: (r["log_prob"] is None, r["log_prob"] or 0.0),
    }  # fmt: skip
    for order, key in orders.items():
        pages = [
            find_trajectories(run.index, TrajectoryQuery(order=order, size=3, page=i))
            for i in (1, 2, 3)
        ]
        got = [row for page in pages for row in page["rows"]]
        assert sorted(map(str, got)) == sorted(map(str, rows)) and pages[0]["pages"] == 3
        assert [key(row) for row in got] == sorted(key(row) for row in rows)
    assert find_trajectories(run.index, TrajectoryQuery(size=3, page=99))["page"] == 3


def test_one_question_is_spread_over_the_steps(
    folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """A selection of many trajectories includes the first and the last step."""
    for step in range(3, 60):
        runs.write_rollouts(folder, step, [(runs.dialogue("Q?", ["x"], "y", row=1), 0.0)])
    run = open_run(folder)
    found = question_history(run.index, "train.parquet#1", "", 10)
    assert len(found) == 10 and [found[0]["step"], found[-1]["step"]] == [1, 59]
    assert len(question_history(run.index, "train.parquet#1", "", 100)) == 4 + 57
    assert question_history(run.index, "train.parquet#1", "val", 100) == []
