"""Scored training trajectories on disk, exact to the token: one jsonl file a step.

`run.json` in the same folder says which tokenizer the ids belong to, and which weights the run
began with. A step that is run again, after a resume, replaces its file. They are read by
`verl.sft.rejection_sampling`, and by runs that learn from them again (`data.rollouts`). What the
trainer found of each token (`SIGNALS`) is there for people, and never read back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from verl.data.rows import BadRow, read_jsonl
from verl.errors import ConfigError, DataError, explain
from verl.files import atomic_write, move_aside
from verl.rewards.interface import Reward
from verl.types import Origin, Prompt, Segment, Status, Trajectory

logger = logging.getLogger(__name__)

HEADER = "run.json"
TOKENIZER, MODEL = "tokenizer", "model"
"""The keys of fingerprints: of the tokenizer, here and in demonstrations; of the first weights."""
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
EXPECTED_ROW = "a row as trainer.rollout_data_dir writes it"
SIGNALS = ("old_log_probs", "ref_log_probs", "values", "advantages", "rollout_weights")
"""What a trainer may know of a token: its own and the reference's log-probs, the critic's value,
the advantage, and the weight that corrects for the engine. A segment's key, and a batch's column.
"""
Signals = Mapping[str, NDArray[np.float32]]
"""By name, a number for each token of a trajectory; NaN where there is none."""
NON_ASCII = re.compile(r"[^\x00-\x7f]+")
ORJSON_OPTIONS = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
)


@dataclass(frozen=True)
class RecordedTrajectory:
    """A trajectory that was kept, with what it was scored."""

    trajectory: Trajectory
    reward: Reward
    greedy_score: float | None = None
    """That of the greedy trajectory of its prompt, where an algorithm sampled one."""


class HasVocabulary(Protocol):
    """What a fingerprint needs of a Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def fingerprint(tokenizer: HasVocabulary) -> str:
    """A name for what each id means: tokenizers of one name read the same ids alike."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def prepare_folder(
    directory: str | Path, tokenizer: HasVocabulary, model: str = "", after: int | None = None
) -> None:
    """Make the folder for a run's trajectories; `model`: the fingerprint of its first weights.

    Steps above `after`, where it is given, are an earlier run's: they are set aside.
    Raises ConfigError for a folder with trajectories of another tokenizer.
    """
    folder, key = Path(directory), "trainer.rollout_data_dir"
    header = {TOKENIZER: fingerprint(tokenizer), MODEL: model}
    if (folder / HEADER).is_file() and read_header(folder) != header[TOKENIZER]:
        got = f"{directory}, with trajectories of another tokenizer"
        fix = "name another folder, or delete it"
        raise ConfigError(explain(key, got, "a folder of its own", fix))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if after is not None:
            _move_later_steps_aside(folder, after)
        write_jsonl(folder / HEADER, [header])
    except OSError as error:
        problem = explain(key, error, "a folder that can be written", "name another")
        raise ConfigError(problem) from error


def _move_later_steps_aside(folder: Path, after: int) -> None:
    """Who reads the folder would take the steps above `after` for the present run's."""
    later = [step_path(folder, step) for step in recorded_steps(folder) if step > after]
    if not later:
        return
    place = move_aside(folder, later)
    if (folder / HEADER).is_file():
        shutil.copyfile(folder / HEADER, place / HEADER)
    logger.warning("trajectories of an earlier run, %d steps after step %d, are now in %s",
                   len(later), after, place)  # fmt: skip


def write_step(
    directory: str | Path, step: int, trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward], greedy_scores: Sequence[float] = (),
    signals: Mapping[tuple[str, int], Signals] | None = None,
) -> None:  # fmt: skip
    """Write one step's trajectories with their scores; the file appears whole or not at all.

    `signals`: what the trainer found, of the trajectories whose (group, sample) it names.
    """
    baselines: Sequence[float | None] = greedy_scores or [None] * len(trajectories)
    known, size = signals or {}, len(trajectories)
    rows = [
        make_row(
            step, size, RecordedTrajectory(one, reward, greedy), known.get((one.group, one.sample))
        )
        for one, reward, greedy in zip(trajectories, rewards, baselines, strict=True)
    ]
    write_jsonl(step_path(directory, step), rows)


def step_path(directory: str | Path, step: int) -> Path:
    """Where the trajectories of a step are."""
    return Path(directory) / f"step_{step:08d}.jsonl"


def recorded_steps(directory: str | Path) -> list[int]:
    """The steps that a folder has, in order."""
    names = (STEP_FILE.fullmatch(path.name) for path in Path(directory).glob("step_*.jsonl"))
    return sorted(int(name[1]) for name in names if name)


def recorded_files(directory: str | Path) -> list[str]:
    """All that a folder holds of a run."""
    return [str(path) for path in sorted(Path(directory).glob("[!.]*.json*"))]


def read_step(directory: str | Path, step: int) -> list[RecordedTrajectory]:
    """One step's trajectories as they were written. Raises DataError for less, or something else.

    Log-probs that the engine did not tell are NaN.
    """
    path = step_path(directory, step)
    rows = list(_rows_of(path))
    found = [parse_row(where, row) for where, row in rows]
    sizes = {row.get("step_size") for _, row in rows} | {len(found)}
    if len(sizes) > 1 or not found:
        written = max(size for size in sizes if isinstance(size, int))
        got = f"{len(found)} trajectories"
        fix = "copy the file again, or leave it and those of later steps out"
        expected = f"the {written} that the step had" if written > len(found) else "a whole step"
        raise DataError(explain(str(path), got, expected, fix))
    return found


def read_header(directory: str | Path) -> str:
    """The fingerprint of the tokenizer that made the folder's ids. Raises DataError."""
    return read_fingerprints(directory)[TOKENIZER]


def read_fingerprints(directory: str | Path) -> Mapping[str, str]:
    """Those of the tokenizer and, where it is known, of the first weights. Raises DataError."""
    header = Path(directory) / HEADER
    if not header.is_file():
        expected = f"a folder with {HEADER}, as trainer.rollout_data_dir names it"
        raise DataError(explain("rollouts", directory, expected, "name that folder"))
    try:
        found = json.loads(header.read_bytes())
        return {TOKENIZER: str(found[TOKENIZER]), MODEL: str(found.get(MODEL, ""))}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fix = "restore it, or name a folder that a run wrote"
        raise DataError(explain(str(header), repr(error), "what a run writes", fix)) from error


def read_rows(directory: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of every step, in order, with its place. Raises DataError for a malformed one."""
    for path in sorted(Path(directory).glob("step_*.jsonl")):
        yield from _rows_of(path)


def _rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in read_jsonl(str(path)):
        if isinstance(row, BadRow):
            raise DataError(f"{row.problem}, or delete the file")
        yield f"{path} line {number + 1}", row


def to_float(value: Any) -> float:
    """A number of a row; null is what was none."""
    return math.nan if value is None else float(value)


def num_calls(stats: Mapping[str, float]) -> float:
    """Turns that called tools: the valid actions other than the answer, as the agent counted."""
    return stats.get("valid_actions", 0.0) - stats.get("answered", 0.0)


def make_row(
    step: int, step_size: int, recorded: RecordedTrajectory, signals: Signals | None = None
) -> dict[str, Any]:
    """What is written of a trajectory."""
    trajectory, reward = recorded.trajectory, recorded.reward
    prompt = trajectory.prompt
    return {
        "step": step, "step_size": step_size, "uid": prompt.uid, "data_source": prompt.data_source,
        "question": prompt.extra_info.get("question", ""),
        "ground_truth": list(prompt.ground_truth), "extra_info": dict(prompt.extra_info),
        "group": trajectory.group, "sample": trajectory.sample, "seed": trajectory.seed,
        "status": trajectory.status.value, "score": reward.score,
        "components": dict(reward.components), "greedy_score": recorded.greedy_score,
        "stats": trajectory.stats,
        "segments": list(_segments(trajectory.segments, signals or {})),
    }  # fmt: skip


def _segments(segments: Sequence[Segment], signals: Signals) -> Iterator[dict[str, Any]]:
    """Each with its own part of the signals."""
    ends = itertools.accumulate(len(one.ids) for one in segments)
    for segment, end in zip(segments, ends, strict=True):
        own = slice(end - len(segment.ids), end)
        parts = {name: column[own] for name, column in signals.items()}
        yield _segment(segment) | {
            name: part[0] if (part == part[0]).all() else part
            for name, part in parts.items()
            if not np.isnan(part).all()
        }


def _segment(segment: Segment) -> dict[str, Any]:
    """What was sampled also says by which weights, and with what log-probs (null: not told)."""
    row: dict[str, Any] = {"origin": segment.origin.name.lower(), "text": segment.text}
    row["ids"] = list(segment.ids)
    if segment.origin is Origin.POLICY:
        row["log_probs"] = [x if math.isfinite(x) else None for x in segment.log_probs]
        row["weight_version"] = segment.weight_version
        if segment.weight_versions:
            row["weight_versions"] = list(segment.weight_versions)
    return row


def parse_row(where: str, row: Any) -> RecordedTrajectory:
    """What `make_row` made. Raises DataError for anything else."""
    try:
        segments = [_read_segment(one) for one in row["segments"]]
        start, greedy = segments[0], row["greedy_score"]
        prompt = Prompt(
            row["uid"], start.ids, row["data_source"], tuple(row["ground_truth"]),
            dict(row["extra_info"]), start.text,
        )  # fmt: skip
        trajectory = Trajectory(
            prompt, segments, Status(row["status"]), dict(row["stats"]),
            group=row["group"], sample=row["sample"], seed=row["seed"],
        )  # fmt: skip
        components = {name: to_float(value) for name, value in row["components"].items()}
        reward = Reward(to_float(row["score"]), components)
        return RecordedTrajectory(trajectory, reward, None if greedy is None else float(greedy))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        fix = "restore the file; one of an earlier version cannot be learned from: record again"
        got = f"{type(error).__name__} {error}"
        raise DataError(explain(where, got, EXPECTED_ROW, fix)) from error


def _read_segment(row: Mapping[str, Any]) -> Segment:
    origin, ids = Origin[row["origin"].upper()], tuple(map(int, row["ids"]))
    if origin is not Origin.POLICY:
        return Segment(origin, ids, row["text"])
    log_probs = tuple(map(to_float, row["log_probs"]))
    versions = tuple(map(int, row.get("weight_versions", ())))
    if len(log_probs) != len(ids) or len(versions) not in (0, len(ids)):
        raise ValueError(f"{len(log_probs)} log_probs, {len(versions)} versions of {len(ids)} ids")
    return Segment(origin, ids, row["text"], log_probs, int(row["weight_version"]), versions)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON line a row, under the final name only when complete; what JSON lacks as its text."""
    with atomic_write(path) as part:
        part.write_text("".join(_to_json_line(row) + "\n" for row in rows), encoding="ascii")


def _to_json_line(row: Mapping[str, Any]) -> str:
    """A row as JSON in ASCII, which no reader cuts at a line end of Unicode; NaN is null."""
    try:
        line = orjson.dumps(row, default=str, option=ORJSON_OPTIONS).decode()
    except TypeError:  # half a character, or a number of over 64 bits, which a question may have
        return json.dumps(row, default=_plain)
    if line.isascii():
        return line
    return NON_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], line)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return orjson.loads(orjson.dumps(value, option=ORJSON_OPTIONS))
    return str(value)
