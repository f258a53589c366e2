"""Scored training trajectories on disk, exact to the token: one jsonl file a step.

`run.json` in the same folder says which tokenizer the ids belong to. A step that is run again,
after a resume, replaces its file. `verl.sft.rejection_sampling` reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.data.rows import BadRow, read_jsonl
from verl.errors import ConfigError, DataError, explain
from verl.files import whole_file
from verl.rewards.interface import Reward
from verl.types import Origin, Segment, Trajectory

HEADER = "run.json"
TOKENIZER = "tokenizer"
"""The key of a tokenizer's fingerprint, here and in demonstrations."""


class Vocabulary(Protocol):
    """What a fingerprint needs of a Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def fingerprint(tokenizer: Vocabulary) -> str:
    """A name for what each id means: tokenizers of one name read the same ids alike."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def open_folder(directory: str | Path, tokenizer: Vocabulary) -> None:
    """Make the folder for a run's trajectories. Raises ConfigError for another tokenizer's."""
    folder = Path(directory)
    header = {TOKENIZER: fingerprint(tokenizer)}
    if (folder / HEADER).is_file() and json.loads((folder / HEADER).read_text()) != header:
        got = f"{directory}, with trajectories of another tokenizer"
        fix = "name another folder, or delete it"
        raise ConfigError(explain("trainer.rollout_data_dir", got, "a folder of its own", fix))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / HEADER, [header])
    except OSError as error:
        expected = "a folder that can be written"
        raise ConfigError(
            explain("trainer.rollout_data_dir", error, expected, "name another")
        ) from error


def write_step(
    directory: str | Path, step: int, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> None:
    """Write one step's trajectories with their scores; the file appears whole or not at all."""
    rows = [_row(step, t, r) for t, r in zip(trajectories, rewards, strict=True)]
    write_lines(Path(directory) / f"step_{step:08d}.jsonl", rows)


def read_header(directory: str | Path) -> str:
    """The fingerprint of the tokenizer that made the folder's ids. Raises DataError."""
    header = Path(directory) / HEADER
    if not header.is_file():
        expected = f"a folder with {HEADER}, as trainer.rollout_data_dir names it"
        raise DataError(explain("rollouts", directory, expected, "name that folder"))
    try:
        return str(json.loads(header.read_bytes())[TOKENIZER])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        fix = "restore it, or name a folder that a run wrote"
        raise DataError(explain(str(header), repr(error), "what a run writes", fix)) from error


def read_rows(directory: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of every step, in order, with its place. Raises DataError for a malformed one."""
    for path in sorted(Path(directory).glob("step_*.jsonl")):
        for number, row in read_jsonl(str(path)):
            if isinstance(row, BadRow):
                raise DataError(f"{row.problem}, or delete the file")
            yield f"{path} line {number + 1}", row


def num_calls(stats: Mapping[str, float]) -> float:
    """Turns that called tools: the valid actions other than the answer, as the agent counted."""
    return stats.get("valid_actions", 0.0) - stats.get("answered", 0.0)


def _row(step: int, trajectory: Trajectory, reward: Reward) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "step": step,
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "question": prompt.extra_info.get("question", ""),
        "ground_truth": list(prompt.ground_truth),
        "group": trajectory.group,
        "sample": trajectory.sample,
        "status": trajectory.status.value,
        "score": reward.score,
        "components": dict(reward.components),
        "stats": trajectory.stats,
        "segments": [_segment(segment) for segment in trajectory.segments],
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


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON line a row, under the final name only when complete."""
    with whole_file(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
