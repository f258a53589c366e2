"""One run as the page sees it: its folder, its options, its metrics, and its trajectories."""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import yaml
from tokenizers import Tokenizer

from search_r1.view.dialogue import Dialogue, tags_of
from search_r1.view.index import TRAIN, VALIDATION, TrajectoryIndex
from search_r1.view.tokens import find_tokenizer, pieces
from verl.config.known import flatten
from verl.data.trajectories import HEADER, SIGNALS
from verl.errors import ConfigError, explain, first_line

Point = tuple[int, float | None]
Curve = tuple[list[int], list[float | None]]
"""Steps and values, in the order of the steps."""


class MetricsLog:
    """Every metric of one run by its step; a step that comes again replaces the old one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, dict[str, float | None]] = {}
        self._read: tuple[int, int] = (0, 0)
        """The file's inode, and how many of its bytes are in `rows`."""

    def refresh(self) -> bool:
        """Read what was added; whether anything was. A last line without its end waits."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                inode, offset = self._read
                is_new = about.st_ino != inode or about.st_size < offset
                offset = 0 if is_new else offset
                file.seek(offset)
                added = file.read()
        except FileNotFoundError:
            return False
        end = added.rfind(b"\n") + 1
        rows = {} if is_new else dict(self.rows)
        for line in added[:end].splitlines():
            row = _row(line)
            if row is not None:
                step = row.pop("step")
                rows[step] = {**rows.get(step, {}), **row}
        self._read = (about.st_ino, offset + end)
        self.rows = rows  # rows too are replaced, never changed: requests read them meanwhile
        return bool(end) or is_new

    def names(self) -> list[str]:
        return sorted({name for row in self.rows.values() for name in row})

    def curve(self, name: str, most: int | None = None) -> Curve:
        """One metric; of more than `most` points, the least and the largest of each stretch."""
        points = [(step, row[name]) for step, row in sorted(self.rows.items()) if name in row]
        if most and len(points) > most:
            points = thinned(points, most)
        return [step for step, _ in points], [value for _, value in points]


def thinned(points: list[Point], most: int) -> list[Point]:
    """At most `most` points that keep the first, the last, and the peaks of every stretch."""
    num = max(1, (most - 2) // 2)
    chosen = {0, len(points) - 1}
    for one in range(num):
        stretch = range(one * len(points) // num, (one + 1) * len(points) // num)
        known = [(value, i) for i in stretch if (value := points[i][1]) is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    return [points[i] for i in sorted(chosen)]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's numbers with its step; None for a line that is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {k: v for k, v in row.items() if v is None or isinstance(v, int | float)}


SIGNS = ("config.yaml", "metrics.jsonl", "validation", HEADER)
"""What tells the folder of a run, or of its trajectories, from any other."""
LAYOUT_VERSION = 2
"""Of the index; another one has a file of its own."""
CREDIT = "credit"
"""Folder of a run with what its documents were worth, as `search-r1 credit` writes it."""
Worths = Mapping[tuple[int, ...], Mapping[str, float]]
"""By the numbers of the search and of the document."""
ENGINE, TRAINER, REFERENCE = "log_probs", "old_log_probs", "ref_log_probs"


def read_config(folder: Path) -> dict[str, Any]:
    """A run's `config.yaml`; empty where there is none. Raises ConfigError for one that is none."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem, fix = first_line(error), "restore the file, or delete it"
        raise ConfigError(explain(str(path), problem, "what a run writes", fix)) from error
    return found if isinstance(found, dict) else {}


def compared(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each option with every run's value as text (None: the run has no such option)."""
    runs = [dict(flatten(config)) for config in configs]
    names = dict.fromkeys(name for run in runs for name in run)
    return [
        {"name": name, "values": values, "differs": len(set(values)) > 1}
        for name in names
        for values in [[yaml_text(run[name]) if name in run else None for run in runs]]
    ]


def yaml_text(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


class Run:
    """A run that is training or finished."""

    def __init__(
        self,
        folder: Path,
        index_dir: Path,
        rollouts: Path | None = None,
        only: Callable[[Collection[int]], Collection[int]] = lambda steps: steps,
    ) -> None:
        """`rollouts`: its training trajectories, where the configuration does not lead there;
        `only`: some steps of each kind are read.

        Raises ConfigError for a folder that is no run's, or an index that cannot be written.
        """
        self.folder = folder.resolve()
        if not any((self.folder / sign).exists() for sign in SIGNS):
            expected = f"a run's trainer.default_local_dir, with {', '.join(SIGNS[:3])}"
            raise ConfigError(explain("RUN", folder, expected, "name the folder of a run"))
        self.name = self.folder.name
        self.metrics = MetricsLog(self.folder / "metrics.jsonl")
        self.version = 0
        """Grows with each change that was read."""
        self._index_dir, self._given, self._only = index_dir, rollouts, only
        self._reading = threading.Lock()
        self._configure(read_config(self.folder))

    def _configure(self, config: Mapping[str, Any]) -> None:
        """Find what a configuration leads to; it may come after the page was opened."""
        self.config = config
        self.tags = tags_of(config)
        self.rollouts = self._given or find_rollouts(self.folder, config)
        folders = {VALIDATION: self.folder / "validation"}
        if self.rollouts is not None:
            folders[TRAIN] = self.rollouts
        key = f"{LAYOUT_VERSION} {self.folder} {self.rollouts}".encode()
        file = self._index_dir / f"{hashlib.sha256(key).hexdigest()[:24]}.sqlite"
        self.index = TrajectoryIndex(file, folders, self.tags, self._only)
        self.tokenizer = find_tokenizer(self.folder, self.rollouts, config)
        """The tokenizer of the dump, or why there is none."""

    def refresh(self, ended: threading.Event | None = None) -> None:
        """Read what the run wrote since, until `ended`; the configuration along with metrics."""
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

    def about(self) -> dict[str, Any]:
        steps = list(self.metrics.rows)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "rollouts": None if self.rollouts is None else str(self.rollouts),
            "version": self.version,
            "last_step": max(steps, default=None),
            "trajectories": self.index.report(),
        }

    def trajectory(
        self, kind: str, step: int, line: int, *, is_brief: bool = False
    ) -> dict[str, Any] | None:
        """One trajectory, by token unless `is_brief`; None where it is not there any more."""
        found = self.index.read(kind, step, line)
        if found is None:
            return None
        facts, path, row, dialogue = found
        shown = self.shown(row, dialogue, is_brief=is_brief)
        worths = self._worths(path, step, line)
        for number, call in enumerate(shown["calls"]):
            for rank, document in enumerate(call["documents"]):
                document["worth"] = worths.get((number, rank))
        return {**facts, **shown}

    def shown(
        self, row: Mapping[str, Any], dialogue: Dialogue, *, is_brief: bool = False
    ) -> dict[str, Any]:
        """What the page shows of a row of a dump, recorded or replayed."""
        tokenizer, problem = self.tokenizer if "segments" in row else (None, "")
        return {
            "accepted": dialogue.gold,
            "components": dialogue.components,
            "stats": row["stats"],
            "problem": problem,
            "segments": [
                {"origin": one["origin"], "text": one["text"]}
                if is_brief
                else _segment(one, tokenizer)
                for one in dialogue.segments
            ],
            "calls": [asdict(search) for search in dialogue.searches],
        }

    def _worths(self, recorded: Path, step: int, line: int) -> Worths:
        """What documents were worth, unless the step was run again since."""
        path = self.folder / CREDIT / recorded.name
        try:
            if path.stat().st_mtime_ns < recorded.stat().st_mtime_ns:
                return {}
            rows = [orjson.loads(one) for one in path.read_bytes().splitlines()]
            return {
                tuple(at): row["worth"]
                for row in rows
                if (row["step"], row["line"]) == (step, line)
                for at in row["places"]
            }
        except (OSError, orjson.JSONDecodeError, LookupError, TypeError):  # of something else
            return {}


def find_rollouts(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Where a run keeps its training trajectories, also after its folder was moved."""
    if (folder / HEADER).is_file():
        return folder
    named = (config.get("trainer") or {}).get("rollout_data_dir")
    if not named:
        return None
    path = Path(named)
    places = (path, folder / path, folder / path.name, folder.parent / path.name)
    return next((one.resolve() for one in places if (one / HEADER).is_file()), path.absolute())


def _segment(segment: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A segment with the text of each token, and every column that has one number a token.

    What the trainer found (`SIGNALS`) is one number where all tokens have the same. Its log-probs
    against the engine's give the ratio, and against the reference's the KL by one sample (k1).
    """
    ids = segment.get("ids") or []
    spread = {
        name: [value] * len(ids) if name in SIGNALS and isinstance(value, float | int) else value
        for name, value in segment.items()
    }
    columns = {
        name: values
        for name, values in spread.items()
        if name != "ids" and isinstance(values, list) and len(values) == len(ids) > 0
    }
    own = columns.get(TRAINER, columns.get(ENGINE, []))
    if TRAINER in columns and ENGINE in columns:
        columns["ratio"] = _by_token(lambda a, b: math.exp(min(a - b, 80.0)), own, columns[ENGINE])
    if REFERENCE in columns and own:
        columns["kl"] = _by_token(lambda a, b: a - b, own, columns[REFERENCE])
    return {
        "origin": segment["origin"],
        "text": segment["text"],
        "weight_version": segment.get("weight_version"),
        "ids": ids,
        "pieces": pieces(tokenizer, ids) if tokenizer and ids else [],
        "columns": columns,
    }


def _by_token(
    function: Callable[[float, float], float], *columns: Sequence[float | None]
) -> list[float | None]:
    """What the function says of each pair of numbers; None where one is not known."""
    pairs = zip(*columns, strict=True)
    return [None if a is None or b is None else function(a, b) for a, b in pairs]
