"""The data of one run: its metrics and its trajectories."""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from search_r1.runs.dialogue import Dialogue, rule_of, tags_of
from search_r1.runs.folder import RUN_FILES, find_rollouts, read_config
from search_r1.runs.tokens import find_tokenizer, pieces
from search_r1.view.index import TRAIN, VALIDATION, TrajectoryIndex
from verl.data.trajectories import SIGNALS
from verl.errors import ConfigError, explain, first_line

Point = tuple[int, float | None]
Curve = tuple[list[int], list[float | None]]
"""Steps in ascending order, and their values."""


class MetricsLog:
    """A run's `metrics.jsonl`; numbers that are logged again for a step replace the old ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, dict[str, float | None]] = {}
        self._read: tuple[int, int] = (0, 0)
        """Inode of the file, and number of bytes already in `rows`."""

    def refresh(self) -> bool:
        """Read new complete lines, and return whether the rows changed."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                inode, offset = self._read
                is_new = stat.st_ino != inode or stat.st_size < offset
                offset = 0 if is_new else offset
                file.seek(offset)
                added = file.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            expected, fix = "the file that a run wrote", "restore the file, or move it away"
            problem = first_line(error)
            raise ConfigError(explain(str(self.path), problem, expected, fix)) from error
        end = added.rfind(b"\n") + 1
        rows = {} if is_new else dict(self.rows)
        for line in added[:end].splitlines():
            row = _row(line)
            if row is not None:
                step = row.pop("step")
                rows[step] = {**rows.get(step, {}), **row}
        self._read = (stat.st_ino, offset + end)
        # Replaced, never modified: requests in other threads may be reading the old dictionaries.
        self.rows = rows
        return bool(end) or is_new

    def names(self) -> list[str]:
        return sorted({name for row in self.rows.values() for name in row})

    def curve(self, name: str, max_points: int | None = None) -> Curve:
        """Return one metric, downsampled to `max_points` if it has more."""
        points = [(step, row[name]) for step, row in sorted(self.rows.items()) if name in row]
        if max_points and len(points) > max_points:
            points = downsample(points, max_points)
        return [step for step, _ in points], [value for _, value in points]


def downsample(points: list[Point], max_points: int) -> list[Point]:
    """Keep the first point, the last, and minimum and maximum of each of equally long stretches."""
    num = max(1, (max_points - 2) // 2)
    chosen = {0, len(points) - 1}
    for number in range(num):
        stretch = range(number * len(points) // num, (number + 1) * len(points) // num)
        known = [(value, i) for i in stretch if (value := points[i][1]) is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    return [points[i] for i in sorted(chosen)]


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the step and the numbers of a line; None if it is not a line of metrics."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    return {
        k: v
        for k, v in row.items()
        if v is None or (isinstance(v, int | float) and math.isfinite(v))
    }


LAYOUT_VERSION = 3
"""Layout of the index; another version uses another file."""
ENGINE, TRAINER, REFERENCE = "log_probs", "old_log_probs", "ref_log_probs"


class Run:
    """The files of a run that is training or finished."""

    def __init__(self, folder: Path, index_dir: Path, rollouts: Path | None = None) -> None:
        """Open a run. Raises ConfigError if `folder` is not one, or the index cannot be written.

        `rollouts` is the folder of its training trajectories, if not the one in its configuration.
        """
        self.folder = folder.resolve()
        if not any((self.folder / name).exists() for name in RUN_FILES):
            expected = f"a run's trainer.default_local_dir, with {', '.join(RUN_FILES[:3])}"
            raise ConfigError(explain("RUN", folder, expected, "name the folder of a run"))
        self.name = self.folder.name
        self.metrics = MetricsLog(self.folder / "metrics.jsonl")
        self.version = 0
        """Incremented with each change that was read."""
        self._index_dir = index_dir
        self._rollouts_option = rollouts
        self._reading = threading.Lock()
        self._configure(read_config(self.folder))

    def _configure(self, config: Mapping[str, Any]) -> None:
        """Set what depends on the configuration, which may appear after the page was opened."""
        self.config = config
        self.tags, self.normalize = tags_of(config), rule_of(config)
        self.rollouts = self._rollouts_option or find_rollouts(self.folder, config)
        folders = {VALIDATION: self.folder / "validation"}
        if self.rollouts is not None:
            folders[TRAIN] = self.rollouts
        key = f"{LAYOUT_VERSION} {self.folder} {self.rollouts}".encode()
        file = self._index_dir / f"{hashlib.sha256(key).hexdigest()[:24]}.sqlite"
        self.index = TrajectoryIndex(file, folders, self.tags, self.normalize)
        self.tokenizer = find_tokenizer(self.folder, self.rollouts, config)
        """The tokenizer of the trajectories, or None and the reason."""

    def refresh(self, ended: threading.Event | None = None) -> None:
        """Read what the run has written since; stops early when `ended` is set.

        The configuration is read again whenever metrics were added.
        """
        with self._reading:
            if self.metrics.refresh():
                self.version += 1
                config = read_config(self.folder)
                if config != self.config:
                    self._configure(config)
            if self.index.refresh(ended):
                self.version += 1
                if self.tokenizer[0] is None:
                    self.tokenizer = find_tokenizer(self.folder, self.rollouts, self.config)

    def summary(self) -> dict[str, Any]:
        steps = list(self.metrics.rows)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "rollouts": None if self.rollouts is None else str(self.rollouts),
            "version": self.version,
            "last_step": max(steps, default=None),
            "trajectories": self.index.summary(),
        }

    def trajectory(
        self, kind: str, step: int, line: int, *, is_brief: bool = False
    ) -> dict[str, Any] | None:
        """Return one trajectory, without its tokens if `is_brief`; None if it is gone."""
        record = self.index.read(kind, step, line)
        if record is None:
            return None
        facts, row, dialogue = record
        return {**facts, **self.dialogue_json(row, dialogue, is_brief=is_brief)}

    def dialogue_json(
        self, row: Mapping[str, Any], dialogue: Dialogue, *, is_brief: bool = False
    ) -> dict[str, Any]:
        """Return the data that the page shows of a recorded or replayed trajectory."""
        tokenizer, problem = self.tokenizer if "segments" in row else (None, "")
        return {
            "accepted": dialogue.gold,
            "components": dialogue.components,
            "stats": row["stats"],
            "problem": problem,
            "segments": [
                {"origin": segment["origin"], "text": segment["text"]}
                if is_brief
                else _segment(segment, tokenizer)
                for segment in dialogue.segments
            ],
            "calls": [asdict(search) for search in dialogue.searches],
        }


def _segment(segment: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a segment with the text of each token and every column of one number per token.

    Columns of the trainer (`SIGNALS`) are recorded as one number if all tokens have the same. The
    ratio is computed from the log-probs of trainer and engine, and the one-sample estimate of the
    KL (k1) from those of trainer (or engine) and reference.
    """
    ids = segment.get("ids") or []
    expanded = {
        name: [value] * len(ids) if name in SIGNALS and isinstance(value, float | int) else value
        for name, value in segment.items()
    }
    columns = {
        name: values
        for name, values in expanded.items()
        if name != "ids" and isinstance(values, list) and len(values) == len(ids) > 0
    }
    policy = columns.get(TRAINER, columns.get(ENGINE, []))
    if TRAINER in columns and ENGINE in columns:
        columns["ratio"] = _map_tokens(
            lambda a, b: math.exp(min(a - b, 80.0)), policy, columns[ENGINE]
        )
    if REFERENCE in columns and policy:
        columns["kl"] = _map_tokens(lambda a, b: a - b, policy, columns[REFERENCE])
    return {
        "origin": segment["origin"],
        "text": segment["text"],
        "weight_version": segment.get("weight_version"),
        "ids": ids,
        "pieces": pieces(tokenizer, ids) if tokenizer and ids else [],
        "columns": columns,
    }


def _map_tokens(
    function: Callable[[float, float], float], *columns: Sequence[float | None]
) -> list[float | None]:
    """Apply `function` to each pair of numbers; None if either is None."""
    pairs = zip(*columns, strict=True)
    return [None if a is None or b is None else function(a, b) for a, b in pairs]
