"""Where metrics go: console, files, tracking libraries, behind one `log(metrics, step)`.

Knows nothing of what the metrics mean, except which few the console shows.
"""

from __future__ import annotations

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
"""The console shows metrics whose name, or its last part, is here; all, where none is."""


class ConsoleTracker(Tracker):
    """One compact line a step through logging."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger.info("step %d  %s", step, compact(metrics))


class JsonlTracker(Tracker):
    """`metrics.jsonl`: one flushed line a step, each step once; a resumed run appends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        self._start = self._path.stat().st_size if self._path.exists() else 0
        self._file = LineWriter(self._path)

    def rewind(self, step: int | None) -> None:
        """Move what is forgotten to `metrics.superseded.jsonl`; a torn last line goes with it."""
        self._file.close()
        old = self._path.read_bytes()
        kept, forgotten = [old[: self._start]], [old[self._start :]]
        if step is not None:
            lines = old.splitlines(keepends=True)
            kept = [line for line in lines if not _is_after(line, step)]
            forgotten = [line for line in lines if _is_after(line, step)]
        if any(forgotten):
            with self._path.with_name("metrics.superseded.jsonl").open("ab") as file:
                file.writelines(forgotten)
            with atomic_write(self._path) as part:
                part.write_bytes(b"".join(kept))
        self._file = LineWriter(self._path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.append(json.dumps({"step": step, **finite}))

    def close(self) -> None:
        self._file.close()


class TensorboardTracker(Tracker):
    """Event files in `directory/tensorboard`."""

    def __init__(self, directory: Path) -> None:
        """TensorBoard's own writer has a thread that dies, with a traceback, on a full disk."""
        self._records = load("tensorboard.summary.writer.record_writer", "tensorboard")
        self._events = load("tensorboard.compat.proto.event_pb2", "tensorboard")
        folder = directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        self._file = LineWriter(folder / name)
        self._add(file_version="brain.Event:2")

    def rewind(self, step: int | None) -> None:
        """TensorBoard passes over the steps that come again."""
        purged = 0 if step is None else step + 1
        self._add(step=purged, session_log={"status": self._events.SessionLog.START})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._add(step=step, summary={"value": values})

    def _add(self, **event: Any) -> None:
        record = io.BytesIO()
        made = self._events.Event(wall_time=time.time(), **event)
        self._records.RecordWriter(record).write(made.SerializeToString())
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
"""Those that need the package of their name."""


class Tracking:
    """All chosen backends at once; a context manager that closes them."""

    def __init__(
        self, project: str, experiment: str, backends: str | Sequence[str | Tracker],
        directory: str | Path, config: Mapping[str, Any] | None = None, is_resumed: bool = False,
    ) -> None:  # fmt: skip
        """Open backends by name (or take trackers as they are), which write below `directory`.

        `config` is a plain dict of the run's options; with `is_resumed` the run goes on with what
        an earlier start of it left there. Raises ConfigError for an unknown name before any backend
        is opened.
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
        """The backends that a run's `trainer` options choose, and `trackers`."""
        trainer = config.trainer
        backends: list[str | Tracker] = [*backend_names(trainer.logger), *trackers]
        return cls(trainer.project_name, trainer.experiment_name, backends,
                   trainer.default_local_dir, public_options(config),
                   is_resumed=trainer.resume_mode != "disable")  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to every backend; numbers of any kind become floats."""
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            with self._spared(tracker):
                tracker.log(plain, step)

    @contextlib.contextmanager
    def _spared(self, tracker: Tracker) -> Iterator[None]:
        """Go on without what a tracker cannot write where `metrics.jsonl` has it, and say so once.

        Raises its error where it is the record itself, or there is none.
        """
        try:
            yield
        except OSError as error:
            has_record = any(isinstance(one, JsonlTracker) for one in self._trackers)
            if isinstance(tracker, JsonlTracker) or not (has_record and is_file_error(error)):
                raise
            if tracker not in self._warned:
                logger.warning("%s: %s; the run goes on, metrics.jsonl has what is missing there",
                               type(tracker).__name__, error)  # fmt: skip
                self._warned.append(tracker)

    def rewind(self, step: int | None) -> None:
        """Forget the steps after `step` everywhere: the run goes on from it.

        None forgets what was logged through this object, for a run that begins anew.
        """
        for tracker in self._trackers:
            with self._spared(tracker):
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
    """Whether a line of the log is of a later step, or was never finished."""
    try:
        return int(json.loads(line)["step"]) > step
    except (ValueError, KeyError, TypeError):
        return True


def backend_names(logger_option: str | Sequence[str]) -> list[str]:
    """`trainer.logger` as a list, whether it was a name or several."""
    return [logger_option] if isinstance(logger_option, str) else list(logger_option)


def compact(metrics: Mapping[str, float]) -> str:
    """The key metrics on one line, four significant digits each."""
    shown = {
        k: v for k, v in metrics.items() if k.rpartition("/")[2] in KEY_METRICS or k in KEY_METRICS
    }
    return "  ".join(f"{name} {value:.4g}" for name, value in (shown or metrics).items())
