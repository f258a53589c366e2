"""`trainer.trace`: what trainer, engines and trajectories did when, for Perfetto or chrome://tracing.

`trace.json` is in the Trace Event Format, whose closing bracket may be missing, so that a run that
goes on only appends. Times are those of the machines' clocks, in microseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.files import LineWriter
from verl.monitor.performance import Timings
from verl.single_controller.actors import Call
from verl.types import Trajectory

Event = dict[str, Any]
TRAINER, ENGINE_ROW = 0, 0
"""The trainer's process number (replica i has 1 + i), and a replica's row for its engine."""
WAITS = "finish_checkpoint"
"""A rank's call that goes on while it does other things."""


class Trace:
    """The file of one run; without a folder nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / "trace.json"
        self._rows: dict[int, list[float]] = {}
        """When each row of a replica is free again."""

    def add_step(
        self, step: int, timings: Timings, trajectories: Sequence[Trajectory],
        calls: Mapping[str, Sequence[Call]],
    ) -> None:  # fmt: skip
        """The phases of a step, the trajectories that it took, whenever they were sampled, and what
        each training rank was called for since the step before, as it measured it."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begin = [] if self._path.exists() else ["["]
        made = [*self._events(step, timings, trajectories), *_ranks(step, calls)]
        events = (json.dumps(event) + "," for event in made)
        with contextlib.closing(LineWriter(self._path)) as file:
            file.append("\n".join([*begin, *events]))

    def _events(
        self, step: int, timings: Timings, trajectories: Sequence[Trajectory]
    ) -> Iterator[Event]:
        yield _name(TRAINER, "trainer")
        for name, begin, end in timings.spans:
            yield _span(name, TRAINER, 0, begin, end, step=step)
        by_replica: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            if trajectory.turn_times:
                by_replica.setdefault(trajectory.replica, []).append(trajectory)
        for replica, own in sorted(by_replica.items()):
            if replica not in self._rows:
                self._rows[replica] = []
                yield _name(1 + replica, f"replica {replica}")
            for begin, end in busy(own):
                yield _span("sampling", 1 + replica, ENGINE_ROW, begin, end)
            for trajectory in sorted(own, key=lambda t: t.turn_times[0].requested):
                yield from self._dialogue(trajectory, step)

    def _dialogue(self, trajectory: Trajectory, step: int) -> Iterator[Event]:
        """Turns, and between them what the dialogue waited for, on the first row that is free."""
        times, process = trajectory.turn_times, 1 + trajectory.replica
        rows = self._rows[trajectory.replica]
        row = next((i for i, free in enumerate(rows) if free <= times[0].requested), len(rows))
        rows[row:] = [times[-1].finished, *rows[row + 1 :]]
        about = {"group": trajectory.group, "sample": trajectory.sample, "step": step}
        for before, turn in zip([times[0], *times], times, strict=False):
            if turn.turn != before.turn:
                yield _span("tool", process, 1 + row, before.finished, turn.requested, **about)
            yield _span("weights", process, 1 + row, turn.requested, turn.started, **about)
            runs = turn.started + turn.queued_s
            if turn.queued_s:
                yield _span("slot", process, 1 + row, turn.started, runs, **about)
            yield _span(f"turn {turn.turn}", process, 1 + row, runs, turn.finished, **about)


def busy(trajectories: Sequence[Trajectory]) -> list[tuple[float, float]]:
    """When at least one of these sampled: (begin, end) of each stretch, in order."""
    stretches: list[tuple[float, float]] = []
    for begin, end in sorted(
        (t.started, t.finished) for one in trajectories for t in one.turn_times
    ):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((begin, end))
    return stretches


def _ranks(step: int, calls: Mapping[str, Sequence[Call]]) -> Iterator[Event]:
    """A row for each rank, below the trainer's phases; waiting for a file is no work."""
    for row, (name, made) in enumerate(calls.items(), 1):
        yield _name(TRAINER, name, row)
        for call in made:
            if call.method != WAITS:
                yield _span(call.method, TRAINER, row, call.begin, call.end, step=step)


def _span(name: str, process: int, row: int, begin: float, end: float, **about: Any) -> Event:
    return {"name": name, "ph": "X", "pid": process, "tid": row, "ts": round(1e6 * begin),
            "dur": round(1e6 * (end - begin)), "args": about}  # fmt: skip


def _name(process: int, name: str, row: int | None = None) -> Event:
    """Names a process, or a row of one."""
    of = {"name": "process_name"} if row is None else {"name": "thread_name", "tid": row}
    return {**of, "ph": "M", "pid": process, "args": {"name": name}}
