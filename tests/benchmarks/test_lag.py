"""The schedule of the lag benchmark."""

from pathlib import Path

from benchmarks.lag import write_schedule
from verl.ext import replay


def test_every_token_of_a_step_is_as_old_as_the_lag_or_the_run(tmp_path: Path) -> None:
    """The trainer starts step t with version t; each trajectory of a step has one entry."""
    entries = list(replay.read(write_schedule(tmp_path, lag=4, steps=7)))
    assert len({(entry.group, entry.sample) for entry in entries}) == len(entries) == 7 * 64
    for entry in entries:
        step = int(entry.group.split("/")[0])
        assert set(entry.versions) == {step - min(4, step - 1)}
