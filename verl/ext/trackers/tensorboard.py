"""TensorBoard: event files. On a full disk its own writer's thread would die with a traceback."""

import io
import os
import time
from collections.abc import Mapping
from typing import Any

from verl.files import LineWriter
from verl.monitor.tracking import TrackedRun, Tracker, package


class TensorboardTracker(Tracker):
    """Writes event files to `tensorboard/` in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._records = package("tensorboard.summary.writer.record_writer")
        self._events = package("tensorboard.compat.proto.event_pb2")
        folder = run.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._file = LineWriter(folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}")
        self._add(file_version="brain.Event:2")

    def rewind(self, step: int | None) -> None:
        """Tell TensorBoard to drop the steps that will be logged again."""
        first_dropped = 0 if step is None else step + 1
        self._add(step=first_dropped, session_log={"status": self._events.SessionLog.START})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._add(step=step, summary={"value": values})

    def _add(self, **event: Any) -> None:
        record, message = io.BytesIO(), self._events.Event(wall_time=time.time(), **event)
        self._records.RecordWriter(record).write(message.SerializeToString())
        self._file.append_bytes(record.getvalue())

    def close(self) -> None:
        self._file.close()
