"""`trainer.trace`: a timeline of trainer, engines and trajectories for Perfetto or chrome://tracing.

`trace.json` is in the Trace Event Format, whose closing bracket is optional, so that a resumed run
can simply append. Times are those of the machines' clocks, in microseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import Config
from verl.files import LineWriter
from verl.monitor.performance import Timings
from verl.single_controller.calls import Call
from verl.trainer.hooks import Hook
from verl.types import Metrics, Trajectory

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

Event = dict[str, Any]
TRAINER, ENGINE_ROW = 0, 0
"""The trainer's process number (replica i has 1 + i), and the row of a replica's engine."""
BACKGROUND_CALL = "finish_checkpoint"
"""Method of a rank that waits while the rank does other work."""


class Trace(Hook):
    """The trace file of one run in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "trace.json"
        self._last_step: int | None = None
        """The last step that was written, or that could not be."""
        self._updated_step: int | None = None
        """The last step whose updates are done."""
        self._rows: dict[int, list[float]] = {}
        """Timestamps at which each row of a replica becomes free again, by replica."""

    @contextlib.contextmanager
    def running(self, trainer: RayPPOTrainer) -> Iterator[None]:
        """Write the step that ends the run, too; its error is the one to raise."""
        try:
            yield
        except Exception:
            if self._updated_step == trainer.step:
                with contextlib.suppress(OSError):
                    self._write(trainer)
            raise

    def on_updated(self, trainer: RayPPOTrainer) -> None:
        """Note that the step has something to write."""
        self._updated_step = trainer.step

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Write the step, only now that its state is known: a full disk cannot lose it."""
        self._write(trainer)

    def _write(self, trainer: RayPPOTrainer) -> None:
        """Write the current step, once."""
        step = trainer.current
        if self._last_step != trainer.step:
            self._last_step = trainer.step
            self.add_step(trainer.step, step.timings, step.samples.trajectories, step.calls)

    def add_step(
        self, step: int, timings: Timings, trajectories: Sequence[Trajectory],
        calls: Mapping[str, Sequence[Call]],
    ) -> None:  # fmt: skip
        """Append one step's phases and trajectories, and each rank's `calls` since the last step.

        The trajectories may have been sampled earlier; calls are timed by the rank.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        begin = [] if self._path.exists() else ["["]
        events = [*self._events(step, timings, trajectories), *_rank_events(step, calls)]
        with contextlib.closing(LineWriter(self._path)) as file:
            file.append("\n".join([*begin, *(json.dumps(event) + "," for event in events)]))

    def _events(
        self, step: int, timings: Timings, trajectories: Sequence[Trajectory]
    ) -> Iterator[Event]:
        yield _name(TRAINER, "trainer")
        for name, begin, end in timings.spans:
            yield _span(name, TRAINER, 0, begin, end, step=step)
        by_replica: dict[int, list[Trajectory]] = {}
        for trajectory in trajectories:
            if trajectory.timeline.turns:
                by_replica.setdefault(trajectory.timeline.replica, []).append(trajectory)
        for replica, own in sorted(by_replica.items()):
            if replica not in self._rows:
                self._rows[replica] = []
                yield _name(1 + replica, f"replica {replica}")
            for begin, end in busy_intervals(own):
                yield _span("sampling", 1 + replica, ENGINE_ROW, begin, end)
            for trajectory in sorted(own, key=lambda t: t.timeline.turns[0].requested):
                yield from self._dialogue(trajectory, step)

    def _dialogue(self, trajectory: Trajectory, step: int) -> Iterator[Event]:
        """Yield the dialogue's turns, and its waits between them, on the first free row."""
        times, replica = trajectory.timeline.turns, trajectory.timeline.replica
        process, rows = 1 + replica, self._rows[replica]
        row = next((i for i, free in enumerate(rows) if free <= times[0].requested), len(rows))
        rows[row : row + 1] = [times[-1].finished]  # replaces the entry, or adds a row
        about = {"group": trajectory.group, "sample": trajectory.sample, "step": step}
        for before, turn in zip([times[0], *times], times, strict=False):
            if turn.turn != before.turn:
                yield _span("tool", process, 1 + row, before.finished, turn.requested, **about)
            yield _span("weights", process, 1 + row, turn.requested, turn.started, **about)
            running = turn.started + turn.measured.queued_s
            if turn.measured.queued_s:
                yield _span("slot", process, 1 + row, turn.started, running, **about)
            yield _span(f"turn {turn.turn}", process, 1 + row, running, turn.finished, **about)


def hook(parts: Parts) -> Trace | None:
    """Return the hook of a run with `trainer.trace`."""
    return Trace(parts.directory) if parts.config.trainer.trace else None


def stat_loggers(config: Config) -> list[Any] | None:
    """Return a class of vLLM's loggers that logs nothing, for a run that is traced.

    vLLM records when a request was scheduled only if there is a logger; its default one would also
    write each token to Prometheus.
    """
    if not config.trainer.trace:
        return None
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415 - vLLM may be missing

    def ignore(*_: Any, **__: Any) -> None:
        pass

    names = [name for name in dir(PrometheusStatLogger) if name.startswith(("log", "record"))]
    methods = dict.fromkeys(["__init__", *names], ignore)
    return [type("SilentLogger", (PrometheusStatLogger,), methods)]


def busy_intervals(trajectories: Sequence[Trajectory]) -> list[tuple[float, float]]:
    """Return the (begin, end) intervals in which at least one trajectory was sampled, in order."""
    intervals: list[tuple[float, float]] = []
    turns = (turn for trajectory in trajectories for turn in trajectory.timeline.turns)
    for begin, end in sorted((turn.started, turn.finished) for turn in turns):
        if intervals and begin <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((begin, end))
    return intervals


def _rank_events(step: int, calls: Mapping[str, Sequence[Call]]) -> Iterator[Event]:
    for row, (name, rank_calls) in enumerate(calls.items(), 1):
        yield _name(TRAINER, name, row)
        for call in rank_calls:
            if call.method != BACKGROUND_CALL:
                yield _span(call.method, TRAINER, row, call.begin, call.end, step=step)


def _span(name: str, process: int, row: int, begin: float, end: float, **about: Any) -> Event:
    return {"name": name, "ph": "X", "pid": process, "tid": row, "ts": round(1e6 * begin),
            "dur": round(1e6 * (end - begin)), "args": about}  # fmt: skip


def _name(process: int, name: str, row: int | None = None) -> Event:
    kind = {"name": "process_name"} if row is None else {"name": "thread_name", "tid": row}
    return {**kind, "ph": "M", "pid": process, "args": {"name": name}}
