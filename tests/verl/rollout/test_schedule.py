"""A recorded schedule on disk: what comes back, and what is refused before a run starts."""

from pathlib import Path

import pytest

from verl.config import Config
from verl.errors import ConfigError
from verl.rollout import schedule
from verl.rollout.schedule import Schedule, ScheduleEntry
from verl.types import Origin, Prompt, Segment, start_trajectory


def row(replica: int = 0, versions: tuple[int, ...] = (1, 2)) -> ScheduleEntry:
    return ScheduleEntry(
        group="1/0", sample=replica, greedy=False, replica=replica, versions=versions
    )


def test_rows_come_back_with_the_last_writing_of_a_step(tmp_path: Path) -> None:
    """A step that is run again replaces what it had."""
    schedule.write(tmp_path, 1, [row(0, (9,))])
    schedule.write(tmp_path, 1, [row(0), row(1, (3,))])
    folder = tmp_path / schedule.FOLDER
    assert list(schedule.read(folder)) == [row(0), row(1, (3,))]
    plan = schedule.load_schedule(str(folder))
    assert plan is not None and schedule.load_schedule(None) is None
    parts = [("1/0", 0, False, 0, 0), ("1/0", 0, False, 1, 0), ("1/0", 0, False, 2, 0),
             ("1/0", 1, False, 0, 0), ("1/0", 0, True, 0, 0)]  # fmt: skip
    assert [plan.version(part) for part in parts] == [1, 2, None, 3, None]


def test_older_weights_are_awaited_until_each_turn_of_those_asked_for_was_sampled() -> None:
    """Also by a turn that is tried twice, which counts once; the next version waits for all."""
    plan = Schedule([row(0, (1, 1, 2)), row(1, (1,))])
    seen = [plan.is_done_before(3)]
    plan.start(("1/0", 0, False))
    turns = [("1/0", 0, False, n, 0) for n in range(3)]
    for turn in (turns[0], turns[0], turns[1]):
        seen.append(plan.is_done_before(2))
        plan.mark_done(turn)
    assert seen == [True, False, False, False]
    assert plan.is_done_before(2) and not plan.is_done_before(3)
    plan.finish(("1/0", 0, False))  # with fewer turns than it had then
    assert plan.is_done_before(3)


def test_a_row_has_the_version_of_each_turn() -> None:
    """Prompt and observations have none."""
    start = start_trajectory(Prompt("q", (1,), "nq", ("a",)), group="2/1", sample=3)
    start.replica = 1
    for version in (4, 5):
        start.segments.append(Segment(Origin.POLICY, (7,), "x", (-1.0,), version))
        start.segments.append(Segment(Origin.OBSERVATION, (8,), "d"))
    expected = ScheduleEntry(group="2/1", sample=3, greedy=True, replica=1, versions=(4, 5))
    assert schedule.entry_of(start, greedy=True) == expected


def test_a_turn_that_weights_cut_is_repeated_in_its_parts() -> None:
    """Where each part ends, and by which weights it is sampled; whole turns end by themselves."""
    start = start_trajectory(Prompt("q", (1,), "nq", ("a",)), group="2/1")
    start.segments.append(Segment(Origin.POLICY, (7,), "x", (-1.0,), 4))
    versions = (4, 4, 5, 7, 7)
    cut = Segment(Origin.POLICY, (8,) * 5, "y", (-1.0,) * 5, 7, versions)
    start.segments.append(cut)
    row = schedule.entry_of(start, greedy=False)
    assert row.versions == (4, 4) and row.cuts == ((1, 2, 5), (1, 3, 7))
    plan, name = (
        Schedule([ScheduleEntry.model_validate_json(row.model_dump_json())]),
        ("2/1", 0, False),
    )
    parts = [(*name, 0, 0), (*name, 1, 0), (*name, 1, 2), (*name, 1, 3)]
    assert [plan.version(part) for part in parts] == [4, 4, 5, 7]
    assert [plan.end(part) for part in parts] == [None, 2, 3, None]
    plan.start(name)
    for part in parts[:2]:
        plan.mark_done(part)
    assert plan.is_done_before(5) and not plan.is_done_before(6)


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, "without step_"), ("{", "Invalid JSON"), ('{"group": 1}', "valid string")],
)
def test_what_is_no_schedule_is_refused_in_a_line(
    tmp_path: Path, content: str | None, error: str
) -> None:
    """Before anything is started."""
    config = Config()
    config.actor_rollout_ref.rollout.replay = str(tmp_path)
    if content is not None:
        (tmp_path / "step_00000001.jsonl").write_text(content)
    (problem,) = schedule.problems(config)
    assert isinstance(problem, ConfigError) and error in str(problem)
    assert "\n" not in str(problem)
