"""The trace of a run: valid for its viewers, complete, and without overlaps in a row."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from verl.ext.trace import Trace, busy_intervals
from verl.monitor.performance import Timings
from verl.single_controller.calls import Call
from verl.types import Measured, Prompt, Timeline, Trajectory, TurnTimes, start_trajectory

TURNS = st.lists(st.integers(0, 50), min_size=3, max_size=9).map(sorted)


def trajectory(marks: list[int], replica: int = 0) -> Trajectory:
    """Return a trajectory whose turns are requested, started and finished at these times."""
    whole = marks[: len(marks) // 3 * 3]
    times = [TurnTimes(*map(float, whole[i : i + 3]), turn=i // 3) for i in range(0, len(whole), 3)]
    start = start_trajectory(Prompt("q", (1,), "nq", ("a",)), group="1/0")
    start.timeline = Timeline(replica, times)
    return start


def events(folder: Path) -> list[dict[str, Any]]:
    """Read the file as viewers do: without the last comma, with the missing bracket added."""
    return list(json.loads((folder / "trace.json").read_text().rstrip().rstrip(",") + "]"))


def test_a_trace_has_phases_engines_and_turns_and_continues_after_a_resume(tmp_path: Path) -> None:
    """Two processes write one file; the second appends to the first one's events."""
    for step in (1, 2):
        timings, trace = Timings(), Trace(tmp_path)
        with timings.phase("gen"):
            pass
        dialogues = [trajectory([1, 2, 3, 5, 5, 6]), trajectory([1, 1, 4], 1)]
        trace.add_step(step, timings, dialogues, {})
    spans = [e for e in events(tmp_path) if e["ph"] == "X"]
    assert [e["name"] for e in spans if e["pid"] == 0] == ["gen", "gen"]
    first = [e for e in spans if e["pid"] == 1 and e["tid"] > 0][:5]
    assert [(e["name"], e["ts"], e["dur"]) for e in first] == [
        ("weights", 1e6, 1e6), ("turn 0", 2e6, 1e6), ("tool", 3e6, 2e6),
        ("weights", 5e6, 0), ("turn 1", 5e6, 1e6),
    ]  # fmt: skip
    assert {e["args"]["step"] for e in spans if e["tid"]} == {1, 2}
    names = {e["args"]["name"] for e in events(tmp_path) if e["ph"] == "M"}
    assert names == {"trainer", "replica 0", "replica 1"}


def test_a_wait_for_a_slot_comes_before_the_turn_that_it_delays(tmp_path: Path) -> None:
    """It follows the wait for weights; without a wait there is no such span."""
    delayed = trajectory([1, 2, 6])
    (turn,) = delayed.timeline.turns
    delayed.timeline = Timeline(turns=[dataclasses.replace(turn, measured=Measured(1.5))])
    Trace(tmp_path).add_step(1, Timings(), [delayed, trajectory([1, 2, 6], 1)], {})
    spans = [e for e in events(tmp_path) if e["ph"] == "X" and e["tid"]]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (1, "weights", 1e6, 1e6), (1, "slot", 2e6, 1.5e6), (1, "turn 0", 3.5e6, 2.5e6),
        (2, "weights", 1e6, 1e6), (2, "turn 0", 2e6, 4e6),
    ]  # fmt: skip


def test_each_rank_has_a_row_with_its_calls(tmp_path: Path) -> None:
    """Timed by the rank's own clock; waiting for a file to be written is left out."""
    trace = Trace(tmp_path)
    update, waiting = Call("actor.update", 7.0, 7.5), Call("finish_checkpoint", 6.0, 9.0)
    for step in (1, 2):
        calls = {"rank 0": [waiting, update], "critic rank 0": [Call("critic.values", 2.0, 4.0)]}
        trace.add_step(step, Timings(), [], calls)
    trace_events = events(tmp_path)
    rows = {e["tid"]: e["args"]["name"] for e in trace_events if e["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["step"])
             for e in trace_events if e["ph"] == "X" and e["pid"] == 0]  # fmt: skip
    assert spans == [
        row
        for step in (1, 2)
        for row in (
            ("rank 0", "actor.update", 7e6, 5e5, step),
            ("critic rank 0", "critic.values", 2e6, 2e6, step),
        )
    ]


@given(st.lists(TURNS, min_size=1, max_size=8))
def test_a_row_holds_one_dialogue_at_a_time(all_marks: list[list[int]]) -> None:
    """Rows are reused once they are free; viewers would nest overlapping spans."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(Path(folder))
        trace.add_step(1, Timings(), [trajectory(marks) for marks in all_marks], {})
        trace_events = events(Path(folder))
    spans = [e for e in trace_events if e["ph"] == "X" and e["tid"] > 0]
    for _, row in itertools.groupby(sorted(spans, key=lambda e: e["tid"]), lambda e: e["tid"]):
        ends = 0
        for event in row:
            assert event["ts"] >= ends
            ends = event["ts"] + event["dur"]


@given(st.lists(TURNS, max_size=6))
def test_an_engine_is_busy_when_any_turn_is_sampled(all_marks: list[list[int]]) -> None:
    """Compared with a check at every half second."""
    dialogues = [trajectory(marks) for marks in all_marks]
    intervals = busy_intervals(dialogues)
    turns = [turn for dialogue in dialogues for turn in dialogue.timeline.turns]
    for half in range(101):
        at = half / 2 + 0.25
        is_busy = any(turn.started <= at < turn.finished for turn in turns)
        assert is_busy == any(begin <= at < end for begin, end in intervals)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(intervals))
