"""Logs metrics to the console, files and tracking libraries through one `log(metrics, step)`.

Each tracking library has a file in `verl/ext/trackers`; `trainer.logger=path/file.py:Name` names a
`Tracker` of the user. Metrics are not interpreted here, only selected for the console.
"""

import functools
import importlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from verl import plugins
from verl.config import Config
from verl.config.cli import public_options
from verl.errors import ConfigError, UserError, explain, first_line
from verl.files import LineWriter, atomic_write

logger = logging.getLogger(__name__)

OPTION = "trainer.logger"
LIBRARIES = tuple(sorted(
    file.stem for file in (Path(__file__).parents[1] / "ext" / "trackers").glob("[!_]*.py")
))  # fmt: skip
"""Trackers with a file in `verl/ext/trackers`, each called as the package that it needs."""
KEY_METRICS = ("val/em", "em", "reward", "score", "loss", "kl", "entropy", "grad_norm", "step_s")
"""Metrics for the console, by name or last part of it; if a step has none, it shows all."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run whose metrics it gets."""

    project: str
    experiment: str
    directory: Path
    """The run's folder, which exists, as an absolute path."""
    options: Mapping[str, Any]
    """The resolved options, without passwords and keys."""
    is_resumed: bool

    def names(self) -> dict[str, Any]:
        """Return the arguments that wandb, SwanLab and Trackio call by the same names."""
        return {"project": self.project, "name": self.experiment, "config": self.options}

    def library_id(self, library: str, create: Callable[[], str]) -> str:
        """Return the run's id in a library: `LIBRARY_RUN_ID`, that of an earlier start, or new."""
        file = self.directory / f"{library}_run_id"
        chosen = os.environ.get(f"{library.upper()}_RUN_ID")
        if not chosen and self.is_resumed and file.exists():
            return file.read_text().strip()
        run_id = chosen or create()
        file.write_text(f"{run_id}\n")
        return run_id


class Tracker:
    """A destination of metrics. Those that `trainer.logger` names are called with a TrackedRun."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Drop the steps after `step`, which will be logged again; None: all steps it has logged.

        A console's lines and a library's metrics stay. Of a step that is logged twice, wandb and
        SwanLab keep the first values, MLflow shows the last ones, Trackio both.
        """

    def close(self) -> None:
        """Flush and release everything."""


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


def package(name: str) -> ModuleType:
    """Import a tracker's library, or a module of it. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        got, fix = f"{library} ({first_line(error)})", f"pip install {library}, or leave it out"
        raise ConfigError(explain(OPTION, got, "an installed package", fix)) from error


def _open_library(name: str, run: TrackedRun) -> Tracker:
    """Start the tracker of a library. Raises ConfigError if the library cannot start."""
    fix = f"correct its settings, or leave it out of {OPTION}"
    with plugins.user_code_errors(OPTION, name, "a tracker that starts", fix=fix):
        module = importlib.import_module(f"verl.ext.trackers.{name}")
        tracker: Tracker = getattr(module, f"{name.capitalize()}Tracker")(run)
        return tracker


BACKENDS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "console": lambda run: ConsoleTracker(),
    "jsonl": lambda run: JsonlTracker(run.directory),
    **{name: functools.partial(_open_library, name) for name in LIBRARIES},
}
"""What opens each tracker, by its name in `trainer.logger`."""


class Tracking:
    """All chosen trackers behind one interface; a context manager that closes them."""

    def __init__(
        self, project: str, experiment: str, backends: str | Sequence[str | Tracker],
        directory: str | Path, config: Mapping[str, Any] | None = None, is_resumed: bool = False,
    ) -> None:  # fmt: skip
        """Open `backends`: names of trackers, which write below `directory`, or Tracker objects.

        `config` is a plain dict of the run's options; with `is_resumed` the trackers continue the
        run in `directory`. Raises ConfigError for an unknown name before one is opened.
        """
        chosen = [backends] if isinstance(backends, str) else list(backends)
        for name in chosen:
            if isinstance(name, str):
                plugins.resolve(OPTION, name, BACKENDS)
        folder = Path(directory).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        run = TrackedRun(project, experiment, folder, config or {}, is_resumed)
        self._trackers: list[Tracker] = [
            plugins.build(OPTION, x, BACKENDS, run, "rewind") if isinstance(x, str) else x
            for x in chosen
        ]
        has_record = any(isinstance(tracker, JsonlTracker) for tracker in self._trackers)
        self._may_fail = [
            tracker for name, tracker in zip(chosen, self._trackers, strict=True)
            if has_record and isinstance(name, str) and not isinstance(tracker, JsonlTracker)
        ]  # fmt: skip
        self._warned: list[Tracker] = []

    @classmethod
    def from_config(cls, config: Config, trackers: Sequence[Tracker] = ()) -> Self:
        """Open the trackers that a run's `trainer` options choose, and add `trackers`."""
        trainer = config.trainer
        backends: list[str | Tracker] = [*backend_names(trainer.logger), *trackers]
        return cls(trainer.project_name, trainer.experiment_name, backends,
                   trainer.default_local_dir, public_options(config),
                   is_resumed=trainer.resume_mode != "disable")  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to every tracker, converted to floats."""
        plain = {name: float(value) for name, value in metrics.items()}
        self._call(lambda tracker: tracker.log(plain, step))

    def rewind(self, step: int | None) -> None:
        """Drop the steps after `step` in every tracker: the run continues from it.

        None drops everything logged through this object, for a run that starts from the beginning.
        """
        self._call(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        """Close every tracker."""
        self._call(lambda tracker: tracker.close())

    def _call(self, action: Callable[[Tracker], None]) -> None:
        """Call every tracker; warn once of one that fails, if `metrics.jsonl` has the metrics."""
        for tracker in self._trackers:
            try:
                action(tracker)
            except Exception as error:  # whatever a library raises, the metrics are not lost
                if tracker not in self._may_fail:
                    raise
                if tracker not in self._warned:
                    names = type(tracker).__name__, type(error).__name__
                    logger.warning("%s: %s: %s; the run continues; metrics.jsonl has all metrics",
                                   *names, first_line(error))  # fmt: skip
                    self._warned.append(tracker)

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


def problems(config: Config) -> Iterator[UserError]:
    """Check that the packages, or the files, of the chosen trackers are there."""
    for name in backend_names(config.trainer.logger):
        # A folder of an earlier run, such as wandb/, counts as a namespace package without origin.
        spec = importlib.util.find_spec(name) if name in LIBRARIES else None
        if name in LIBRARIES and (spec is None or spec.origin is None):
            fix = f"pip install {name}, or trainer.logger=[console,jsonl]"
            expected = "an installed package"
            yield ConfigError(explain("trainer.logger", f"{name}, not installed", expected, fix))
        try:
            plugins.resolve("trainer.logger", name, BACKENDS)
        except ConfigError as error:
            yield error
