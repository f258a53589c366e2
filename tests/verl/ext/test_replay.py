"""A recorded schedule: reading, writing, repeating turns, and errors before a run starts."""

from pathlib import Path

import pytest

from verl.config import Config
from verl.errors import ConfigError
from verl.ext import replay
from verl.ext.replay import Schedule, ScheduleEntry
from verl.types import Origin, Prompt, Segment, Timeline, start_trajectory


def entry(replica: int = 0, versions: tuple[int, ...] = (1, 2)) -> ScheduleEntry:
    return ScheduleEntry(group="1/0", sample=replica, replica=replica, versions=versions)


def test_written_entries_are_read_again(tmp_path: Path) -> None:
    """A step that is run again replaces its entries."""
    replay.write(tmp_path, 1, [entry(0, (9,))])
    replay.write(tmp_path, 1, [entry(0), entry(1, (3,))])
    folder = tmp_path / replay.FOLDER
    assert list(replay.read(folder)) == [entry(0), entry(1, (3,))]
    repeated = Schedule(replay.read(folder))
    turns = [("1/0", 0, 0), ("1/0", 0, 1), ("1/0", 0, 2), ("1/0", 1, 0), ("1/0", 2, 0)]
    assert [repeated.version(turn) for turn in turns] == [1, 2, None, 3, None]


def test_turns_of_older_weights_are_pending_until_they_were_sampled() -> None:
    """Only turns of started trajectories; a turn that is sampled twice counts once."""
    repeated = Schedule([entry(0, (1, 1, 2)), entry(1, (1,))])
    seen = [repeated.is_done_before(3)]
    repeated.start(("1/0", 0))
    turns = [("1/0", 0, n) for n in range(3)]
    for turn in (turns[0], turns[0], turns[1]):
        seen.append(repeated.is_done_before(2))
        repeated.mark_done(turn)
    assert seen == [True, False, False, False]
    assert repeated.is_done_before(2) and not repeated.is_done_before(3)
    repeated.finish(("1/0", 0))  # with fewer turns than recorded
    assert repeated.is_done_before(3)


def test_an_entry_has_the_version_of_each_turn() -> None:
    """Prompt and observations have no version."""
    start = start_trajectory(Prompt("q", (1,), "nq", ("a",)), group="2/1", sample=3)
    start.timeline = Timeline(1)
    for version in (4, 5):
        start.segments.append(Segment(Origin.POLICY, (7,), "x", (-1.0,), version))
        start.segments.append(Segment(Origin.OBSERVATION, (8,), "d"))
    expected = ScheduleEntry(group="2/1", sample=3, replica=1, versions=(4, 5))
    assert replay.entry_of(start) == expected


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "without step_"),
        ("{", "Invalid JSON"),
        ('{"group": 1}', "valid string"),
        (
            '{"group": "1", "sample": 0, "replica": 0, "versions": [1], "cuts": [[0, 2, 2]]}',
            "at most 0",
        ),
    ],
)
def test_an_invalid_schedule_is_rejected_in_one_line(
    tmp_path: Path, content: str | None, error: str
) -> None:
    """It is rejected before anything is started."""
    config = Config()
    config.actor_rollout_ref.rollout.replay = str(tmp_path)
    if content is not None:
        (tmp_path / "step_00000001.jsonl").write_text(content)
    (problem,) = replay.problems(config)
    assert isinstance(problem, ConfigError) and error in str(problem)
    assert "\n" not in str(problem)
