"""Logs metrics to the console, files and tracking libraries through one `log(metrics, step)`.

It does not interpret the metrics; it only selects the few that the console shows.
"""

import contextlib
import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from verl.config import Config
from verl.config.cli import public_options
from verl.errors import ConfigError, explain
from verl.files import LineWriter, atomic_write, is_file_error
from verl.monitor.library_trackers import (
    MlflowTracker,
    SwanlabTracker,
    Tracker,
    TrackioTracker,
    WandbTracker,
    load,
)

__all__ = ["BACKENDS", "PACKAGES", "Tracker", "Tracking", "backend_names"]

logger = logging.getLogger(__name__)

KEY_METRICS = ("val/em", "em", "reward", "score", "loss", "kl", "entropy", "grad_norm", "step_s")
"""Metrics for the console, by name or last part of it; if a step has none, it shows all."""


class ConsoleTracker(Tracker):
    """Logs one compact line per step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger.info("step %d  %s", step, compact(metrics))


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: one flushed line per step, each step once; a resumed run appends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        self._start = self._path.stat().st_size if self._path.exists() else 0
        self._file = LineWriter(self._path)

    def rewind(self, step: int | None) -> None:
        """Move the later steps, and an incomplete last line, to `metrics.superseded.jsonl`."""
        self._file.close()
        old = self._path.read_bytes()
        if step is None:
            kept, superseded = [old[: self._start]], [old[self._start :]]
        else:
            lines = old.splitlines(keepends=True)
            kept = [line for line in lines if not _is_after(line, step)]
            superseded = [line for line in lines if _is_after(line, step)]
        if any(superseded):
            with self._path.with_name("metrics.superseded.jsonl").open("ab") as file:
                file.writelines(superseded)
            with atomic_write(self._path) as part:
                part.write_bytes(b"".join(kept))
        self._file = LineWriter(self._path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.append(json.dumps({"step": step, **finite}))

    def close(self) -> None:
        self._file.close()


class TensorboardTracker(Tracker):
    """Writes event files to `directory/tensorboard`.

    TensorBoard's own writer is not used: on a full disk its thread dies with a traceback.
    """

    def __init__(self, directory: Path) -> None:
        self._records = load("tensorboard.summary.writer.record_writer", "tensorboard")
        self._events = load("tensorboard.compat.proto.event_pb2", "tensorboard")
        folder = directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self._file = LineWriter(folder / name)
        self._add(file_version="brain.Event:2")

    def rewind(self, step: int | None) -> None:
        """Tell TensorBoard to drop the steps that will be logged again."""
        first_dropped = 0 if step is None else step + 1
        self._add(step=first_dropped, session_log={"status": self._events.SessionLog.START})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._add(step=step, summary={"value": values})

    def _add(self, **event: Any) -> None:
        record = io.BytesIO()
        message = self._events.Event(wall_time=time.time(), **event)
        self._records.RecordWriter(record).write(message.SerializeToString())
        self._file.append_bytes(record.getvalue())

    def close(self) -> None:
        self._file.close()


_BUILDERS: Mapping[str, Callable[..., Any]] = {
    "console": lambda *_: ConsoleTracker(),
    "jsonl": lambda project, experiment, directory, *_: JsonlTracker(directory),
    "wandb": WandbTracker,
    "tensorboard": lambda project, experiment, directory, *_: TensorboardTracker(directory),
    "mlflow": MlflowTracker, "swanlab": SwanlabTracker, "trackio": TrackioTracker,
}  # fmt: skip
BACKENDS = tuple(_BUILDERS)
PACKAGES = BACKENDS[2:]
"""Backends that need the package of the same name."""


class Tracking:
    """All chosen backends behind one interface; a context manager that closes them."""

    def __init__(
        self, project: str, experiment: str, backends: str | Sequence[str | Tracker],
        directory: str | Path, config: Mapping[str, Any] | None = None, is_resumed: bool = False,
    ) -> None:  # fmt: skip
        """Open `backends`: names of backends, which write below `directory`, or Tracker objects.

        `config` is a plain dict of the run's options; with `is_resumed` the backends continue the
        run in `directory`. Raises ConfigError for an unknown name before a backend is opened.
        """
        chosen = [backends] if isinstance(backends, str) else list(backends)
        for name in chosen:
            if isinstance(name, str) and name not in _BUILDERS:
                expected = f"one of {', '.join(BACKENDS)}"
                raise ConfigError(explain("trainer.logger", name, expected, "trainer.logger=jsonl"))
        run = project, experiment, Path(directory), config, is_resumed
        self._warned: list[Tracker] = []
        self._trackers = [_BUILDERS[x](*run) if isinstance(x, str) else x for x in chosen]

    @classmethod
    def from_config(cls, config: Config, trackers: Sequence[Tracker] = ()) -> Self:
        """Open the backends that a run's `trainer` options choose, and add `trackers`."""
        trainer = config.trainer
        backends: list[str | Tracker] = [*backend_names(trainer.logger), *trackers]
        return cls(trainer.project_name, trainer.experiment_name, backends,
                   trainer.default_local_dir, public_options(config),
                   is_resumed=trainer.resume_mode != "disable")  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to every backend, converted to floats."""
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            with self._tolerate_write_errors(tracker):
                tracker.log(plain, step)

    @contextlib.contextmanager
    def _tolerate_write_errors(self, tracker: Tracker) -> Iterator[None]:
        """Turn a tracker's write errors into one warning, if `metrics.jsonl` has the metrics."""
        try:
            yield
        except OSError as error:
            has_record = any(isinstance(t, JsonlTracker) for t in self._trackers)
            if isinstance(tracker, JsonlTracker) or not (has_record and is_file_error(error)):
                raise
            if tracker not in self._warned:
                logger.warning("%s: %s; the run continues; metrics.jsonl has the missing metrics",
                               type(tracker).__name__, error)  # fmt: skip
                self._warned.append(tracker)

    def rewind(self, step: int | None) -> None:
        """Drop the steps after `step` in every backend: the run continues from it.

        None drops everything logged through this object, for a run that starts from the beginning.
        """
        for tracker in self._trackers:
            with self._tolerate_write_errors(tracker):
                tracker.rewind(step)

    def close(self) -> None:
        """Close every backend."""
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_after(line: bytes, step: int) -> bool:
    """Return whether a line of the log belongs to a later step or is incomplete."""
    try:
        return int(json.loads(line)["step"]) > step
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return True


def backend_names(logger_option: str | Sequence[str]) -> list[str]:
    """Return `trainer.logger`, a name or a list of names, as a list."""
    return [logger_option] if isinstance(logger_option, str) else list(logger_option)


def compact(metrics: Mapping[str, float]) -> str:
    """Return the key metrics on one line, with four significant digits each."""
    shown = {
        k: v for k, v in metrics.items() if k.rpartition("/")[2] in KEY_METRICS or k in KEY_METRICS
    }
    return "  ".join(f"{name} {value:.4g}" for name, value in (shown or metrics).items())
