"""The schedule and the table of the lag benchmark."""

from pathlib import Path

from benchmarks.lag import LagRun, table, write_schedule
from verl.ext import replay


def test_every_token_of_a_step_is_as_old_as_the_lag_or_the_run(tmp_path: Path) -> None:
    """The trainer starts step t with version t; each trajectory of a step has one entry."""
    entries = list(replay.read(write_schedule(tmp_path, lag=4, steps=7)))
    assert len({(entry.group, entry.sample) for entry in entries}) == len(entries) == 7 * 64
    for entry in entries:
        step = int(entry.group.split("/")[0])
        assert set(entry.versions) == {step - min(4, step - 1)}


def test_the_table_has_a_row_for_each_lag() -> None:
    """A row has the means over the seeds, and "never" if no run reached the EM."""
    runs = [
        LagRun("engine", 0, 0, [(0, 0.2), (2, 0.8), (4, 0.9)], [0.0], 0.0),
        LagRun("engine", 0, 1, [(0, 0.2), (2, 0.9), (4, 1.0)], [0.0], 0.01),
        LagRun("engine", 16, 0, [(0, 0.2), (2, 0.2), (4, 0.4)], [0.5, 16.0], 0.1),
    ]
    assert table(runs).splitlines()[2:] == [
        "| engine | 0 | 0.0 | 0.950 | 0.900 | 3 | 0.0050 |",
        "| engine | 16 | 16.0 | 0.400 | 0.300 | never | 0.1000 |",
    ]
