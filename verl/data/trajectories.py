"""Recorded training trajectories with their scores and exact token ids: one jsonl file per step.

`run.json` in the same folder identifies the tokenizer of the ids and the initial weights of the
run. A step that runs again after a resume replaces its file. The files are read by
`verl.trainer.rejection_sampling` and by runs that train on them again (`data.rollouts`). The
trainer's values of each token (`SIGNALS`) are written for inspection only and never read back.
"""

import hashlib
import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from verl.data.records import BadRow, read_jsonl
from verl.errors import ConfigError, DataError, explain
from verl.files import MAX_CHARS, atomic_write, move_aside
from verl.rewards.interface import Reward
from verl.types import Draw, Origin, Prompt, Segment, Status, Trajectory, TrajectoryKey

logger = logging.getLogger(__name__)

HEADER = "run.json"
"""Name of the file with the fingerprints."""
TOKENIZER, MODEL = "tokenizer", "model"
"""Keys of the fingerprints of the tokenizer (also in demonstrations) and of the initial weights."""
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
EXPECTED_ROW = "a row as trainer.rollout_data_dir writes it"
SIGNALS = ("old_log_probs", "ref_log_probs", "values", "advantages", "rollout_weights")
"""The trainer's values per token, named as in `TokenBatch`: log-probs of policy and reference, the
critic's value, the advantage, and the importance weight of trainer against engine."""
Signals = Mapping[str, NDArray[np.float32]]
"""Each signal by name, as one number per token of a trajectory; NaN where it is undefined."""
NON_ASCII = re.compile(r"[^\x00-\x7f]+")
ORJSON_OPTIONS = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
)


@dataclass(frozen=True)
class RecordedTrajectory:
    """A recorded trajectory with its reward."""

    trajectory: Trajectory
    reward: Reward


class HasVocabulary(Protocol):
    """The part of a Hugging Face tokenizer that its fingerprint depends on."""

    def get_vocab(self) -> dict[str, int]: ...


def fingerprint(tokenizer: HasVocabulary) -> str:
    """Return a hash of the vocabulary: tokenizers with equal hashes give each id the same token."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def prepare_folder(
    directory: str | Path, tokenizer: HasVocabulary, model: str = "", after: int | None = None
) -> None:
    """Create the folder for a run's trajectories, or prepare an existing one.

    `model` is the fingerprint of the run's initial weights. Recorded steps later than `after` are
    of an earlier run and are moved aside. Raises ConfigError if the folder cannot be written or has
    trajectories of another tokenizer.
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
    """Move the files of later steps away, so that readers do not take them for this run's."""
    later = [step_path(folder, step) for step in recorded_steps(folder) if step > after]
    if not later:
        return
    moved_to = move_aside(folder, later)
    if (folder / HEADER).is_file():
        shutil.copyfile(folder / HEADER, moved_to / HEADER)
    logger.warning("moved the trajectories of an earlier run, %d steps after step %d, to %s",
                   len(later), after, moved_to)  # fmt: skip


def write_step(
    directory: str | Path, step: int, trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward], signals: Mapping[TrajectoryKey, Signals] | None = None,
) -> None:  # fmt: skip
    """Write one step's trajectories with their scores, atomically.

    `signals`: the trainer's values by (group, sample), for all or some of the trajectories.
    """
    step_size = len(trajectories)
    rows = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        recorded = RecordedTrajectory(trajectory, reward)
        own_signals = (signals or {}).get(trajectory.key)
        rows.append(make_row(step, step_size, recorded, own_signals))
    write_jsonl(step_path(directory, step), rows)


def step_path(directory: str | Path, step: int) -> Path:
    """Return the path of a step's file."""
    return Path(directory) / f"step_{step:08d}.jsonl"


def recorded_steps(directory: str | Path) -> list[int]:
    """Return the numbers of the recorded steps of a folder, in order."""
    matches = (STEP_FILE.fullmatch(path.name) for path in Path(directory).glob("step_*.jsonl"))
    return sorted(int(match[1]) for match in matches if match)


def recorded_files(directory: str | Path) -> list[str]:
    """Return the paths of all recorded files of a run, header included."""
    return [str(path) for path in sorted(Path(directory).glob("[!.]*.json*"))]


def read_step(directory: str | Path, step: int) -> list[RecordedTrajectory]:
    """Read one step's trajectories; log-probs that the engine omitted are NaN. Raises DataError."""
    path = step_path(directory, step)
    rows = list(_read_step_rows(path))
    trajectories = [parse_row(location, row) for location, row in rows]
    count = len(trajectories)
    sizes = {row.get("step_size") for _, row in rows} | {count}
    if len(sizes) > 1 or not trajectories:
        written = max(size for size in sizes if isinstance(size, int))
        fix = "copy the file again, or leave it and those of later steps out"
        expected = f"the {written} that the step had" if written > count else "a whole step"
        raise DataError(explain(str(path), f"{count} trajectories", expected, fix))
    return trajectories


def read_header(directory: str | Path) -> str:
    """Return the fingerprint of the tokenizer of the folder's ids. Raises DataError."""
    return read_fingerprints(directory)[TOKENIZER]


def read_fingerprints(directory: str | Path) -> Mapping[str, str]:
    """Read the fingerprints of tokenizer and initial weights ("" if unknown). Raises DataError."""
    header = Path(directory) / HEADER
    if not header.is_file():
        expected = f"a folder with {HEADER}, as trainer.rollout_data_dir names it"
        raise DataError(explain("rollouts", directory, expected, "name that folder"))
    try:
        content = json.loads(header.read_bytes())
        return {TOKENIZER: str(content[TOKENIZER]), MODEL: str(content.get(MODEL, ""))}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fix = "restore it, or name a folder that a run wrote"
        expected = "fingerprints as a run writes them"
        raise DataError(explain(str(header), repr(error), expected, fix)) from error


def read_rows(directory: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for messages, row) of all steps in order. Raises DataError if malformed."""
    for path in sorted(Path(directory).glob("step_*.jsonl")):
        yield from _read_step_rows(path)


def _read_step_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in read_jsonl(str(path), MAX_CHARS):
        if isinstance(row, BadRow):
            raise DataError(f"{row.problem}, or delete the file")
        yield f"{path} line {number + 1}", row


def to_float(value: Any) -> float:
    """Return a number of a row as a float; null, which JSON has instead of NaN, becomes NaN."""
    return math.nan if value is None else float(value)


def make_row(
    step: int, step_size: int, recorded: RecordedTrajectory, signals: Signals | None = None
) -> dict[str, Any]:
    """Return the row that is written for a trajectory."""
    trajectory, reward = recorded.trajectory, recorded.reward
    prompt = trajectory.prompt
    return {
        "step": step, "step_size": step_size, "uid": prompt.uid, "data_source": prompt.data_source,
        "question": prompt.extra_info.get("question", ""),
        "ground_truth": list(prompt.ground_truth), "row_truth": prompt.row_truth,
        "extra_info": dict(prompt.extra_info),
        **asdict(trajectory.draw),
        "status": trajectory.status.value, "score": reward.score,
        "components": dict(reward.components), "is_right": reward.is_right,
        "stats": trajectory.stats,
        "segments": list(_segments(trajectory.segments, signals or {})),
    }  # fmt: skip


def _segments(segments: Sequence[Segment], signals: Signals) -> Iterator[dict[str, Any]]:
    """Yield each segment as a row with its signals; a signal that is constant is one number."""
    ends = itertools.accumulate(len(segment.ids) for segment in segments)
    for segment, end in zip(segments, ends, strict=True):
        row = _make_segment(segment)
        for name, column in signals.items():
            values = column[end - len(segment.ids) : end]
            if not np.isnan(values).all():
                row[name] = values[0] if (values == values[0]).all() else values
        yield row


def _make_segment(segment: Segment) -> dict[str, Any]:
    """Return a segment as a row. Sampled segments have log-probs (null if unknown) and versions."""
    row: dict[str, Any] = {"origin": segment.origin.name.lower(), "text": segment.text}
    row["ids"] = list(segment.ids)
    if segment.origin is Origin.POLICY:
        row["log_probs"] = [x if math.isfinite(x) else None for x in segment.log_probs]
        row["weight_version"] = segment.weight_version
    return row


def parse_row(location: str, row: Any) -> RecordedTrajectory:
    """Parse a row of `make_row`. Raises DataError with `location` for a malformed one."""
    try:
        segments = [_parse_segment(segment) for segment in row["segments"]]
        start = segments[0]
        prompt = Prompt(
            row["uid"], start.ids, row["data_source"], _parse_truth(row["ground_truth"]),
            dict(row["extra_info"]), start.text, _parse_row_truth(row),
        )  # fmt: skip
        trajectory = Trajectory(
            prompt, segments, Status(row["status"]), dict(row["stats"]),
            draw=Draw(row["group"], row["sample"], row["seed"]),
        )  # fmt: skip
        components = {name: to_float(value) for name, value in row["components"].items()}
        reward = Reward(to_float(row["score"]), components, row.get("is_right"))
        return RecordedTrajectory(trajectory, reward)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        fix = "restore the file; files of an earlier version cannot be trained on: record again"
        got = f"{type(error).__name__} {error}"
        raise DataError(explain(location, got, EXPECTED_ROW, fix)) from error


def _parse_truth(value: Any) -> tuple[str, ...]:
    """Return the recorded answers; a text would be split into its characters."""
    if not isinstance(value, list) or not all(isinstance(answer, str) for answer in value):
        raise ValueError("ground_truth, which is not a list of texts")
    return tuple(value)


def _parse_row_truth(row: Mapping[str, Any]) -> Any:
    """Return the ground truth of the row; files of an earlier version have only its form."""
    form, answers = row.get("truth_form", "target"), row["ground_truth"]
    if "row_truth" in row or form == "target":
        return row.get("row_truth")
    return answers[0] if form == "text" and len(answers) == 1 else answers


def _parse_segment(row: Mapping[str, Any]) -> Segment:
    origin, ids = Origin[row["origin"].upper()], tuple(map(int, row["ids"]))
    if origin is not Origin.POLICY:
        return Segment(origin, ids, row["text"])
    log_probs = tuple(map(to_float, row["log_probs"]))
    if len(log_probs) != len(ids):
        raise ValueError(f"{len(log_probs)} log_probs of {len(ids)} ids")
    if "weight_versions" in row:
        raise ValueError("a turn that new weights interrupted")
    return Segment(origin, ids, row["text"], log_probs, int(row["weight_version"]))


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON line per row, atomically; values unknown to JSON are written as text."""
    with atomic_write(path) as part:
        part.write_text("".join(_to_json_line(row) + "\n" for row in rows), encoding="ascii")


def _to_json_line(row: Mapping[str, Any]) -> str:
    """Format a row as ASCII JSON, which no reader splits at Unicode line ends; NaN becomes null."""
    try:
        line = orjson.dumps(row, default=str, option=ORJSON_OPTIONS).decode()
    except TypeError:  # questions may have lone surrogates, and integers of over 64 bits
        return json.dumps(row, default=_to_json_value)
    if line.isascii():
        return line
    return NON_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], line)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return orjson.loads(orjson.dumps(value, option=ORJSON_OPTIONS))
    return str(value)
