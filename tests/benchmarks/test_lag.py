"""Lag against EM: what its schedule says, and what its table makes of runs."""

from pathlib import Path

from benchmarks.lag import Course, table, write_schedule
from verl.rollout import schedule


def test_every_token_of_a_step_is_as_old_as_the_lag_or_the_run(tmp_path: Path) -> None:
    """The trainer starts step t with version t; each trajectory of the step is there once."""
    rows = list(schedule.read(write_schedule(tmp_path, lag=4, steps=7)))
    assert len({(row.group, row.sample) for row in rows}) == len(rows) == 7 * 64
    for row in rows:
        step = int(row.group.split("/")[0])
        assert set(row.versions) == {step - min(4, step - 1)} and not row.cuts


def test_a_row_for_each_lag() -> None:
    """Means over seeds; a run that never got there says so."""
    courses = [
        Course("engine", 0, 0, [(0, 0.2), (2, 0.8), (4, 0.9)], [0.0], 0.0),
        Course("engine", 0, 1, [(0, 0.2), (2, 0.9), (4, 1.0)], [0.0], 0.01),
        Course("engine", 16, 0, [(0, 0.2), (2, 0.2), (4, 0.4)], [0.5, 16.0], 0.1),
    ]
    assert table(courses).splitlines()[2:] == [
        "| engine | 0 | 0.0 | 0.950 | 0.900 | 3 | 0.0050 |",
        "| engine | 16 | 16.0 | 0.400 | 0.300 | never | 0.1000 |",
    ]
