"""Checkpoint folders: names, markers, the driver's state, atomic creation and removal.

A folder not named `global_step_N`, or without `COMPLETE`, is never resumed from. Checkpoints that a
killed run left half-written are removed at the next start. A run locks its folder (`verl.files`),
so that no other run can still be writing what looks half-written.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from verl.checkpoint.contents import listed_files
from verl.checkpoint.names import MARKER as MARKER
from verl.checkpoint.names import is_complete as is_complete
from verl.checkpoint.names import step_of as step_of
from verl.errors import ConfigError, explain
from verl.files import fsync, move_aside
from verl.training.checkpoint_files import read_json

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
TOKENIZER_FOLDER = "huggingface"
"""Folder of a checkpoint with config, tokenizer and dialogue settings of the policy."""
EXPECTED = f"global_step_N with {MARKER} inside"
"""Describes a checkpoint in error messages."""
TEMPORARY_NAME = re.compile(r"global_step_(\d+)\.([0-9a-f]{8}\.)?tmp")
EARLIER_NAMES = ("reward", "guard", "ahead")
"""Names of `RunState.others` that are parts' of ours: until 2026-11-29 they stood beside it."""
VALIDATION = "validation"
"""Folder of a run's validation dialogues, with one file per step."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    root: Path
    step: int
    folder: Path
    started: float = field(default_factory=time.monotonic)
    """Start of the writing, in seconds of the monotonic clock."""


def step_folder(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`, whether it exists or not."""
    return root / f"global_step_{step}"


def write_state(step_dir: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's state as JSON."""
    (step_dir / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")


def read_state(step_dir: Path) -> dict[str, Any]:
    """Read the driver's state. Raises ModelError."""
    return read_json(step_dir / STATE_FILE, lambda content: dict(content))


@dataclass(frozen=True)
class RunState:
    """State of a run after a finished step, as JSON; old checkpoints may lack optional fields."""

    step: int
    sampler: Mapping[str, Any]
    """Position in the training data."""
    kl_coef: float
    best: Mapping[str, Any] | None = None
    """`metric`, `value` and `step` of the best validation so far."""
    score: float | None = None
    """Value of `trainer.best_metric` at this step; None if the step was not validated."""
    pending: Mapping[str, float] | None = None
    """Metrics of a step whose updates are done but which is not yet validated and logged."""
    version: int | None = None
    """Version of the weights that the engines received after the step."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """States of what a run can do without, by the names that its parts chose."""

    @property
    def next_version(self) -> int:
        """Version of the weights that the next step starts with."""
        return self.step + 1 if self.version is None else self.version

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Return the state with these fields; entries of other names go to `others`."""
        own = {f.name for f in fields(cls)}
        others = {name: value for name, value in state.items() if name not in own}
        return cls(**{n: value for n, value in state.items() if n in own}, others=others)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the state with these entries in the place of those before."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "others"}
        return self.of({**own, **self.others, **changes})

    @classmethod
    def read(cls, step_dir: Path) -> Self:
        """Read the state of a checkpoint, ignoring unknown keys. Raises ModelError."""
        step = step_of(step_dir)
        return read_json(step_dir / STATE_FILE, lambda content: cls._of_json(content, step))

    @classmethod
    def _of_json(cls, content: Any, step: int) -> Self:
        earlier = {name: content[name] for name in EARLIER_NAMES if content.get(name) is not None}
        others = {**earlier, **content.get("others", {})}
        state = TypeAdapter(cls).validate_python({**content, "others": others})
        if state.step != step or not math.isfinite(state.kl_coef):
            raise ValueError(f"step {state.step}, KL coefficient {state.kl_coef}")
        return state


def all_complete(root: Path) -> list[Path]:
    """Return the complete checkpoints below `root`, oldest step first."""
    return sorted(filter(is_complete, root.glob("global_step_*")), key=step_of)


def latest(root: Path) -> Path | None:
    """Return the complete checkpoint of the highest step below `root`, or None."""
    return max(all_complete(root), key=step_of, default=None)


def resume_folder(resume_mode: str, root: Path) -> Path | None:
    """Return the checkpoint that `trainer.resume_mode` refers to, or None. Raises ConfigError."""
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        return latest(root)
    path = Path(resume_mode)
    if not is_complete(path):
        fix = "give auto, or the path of a complete checkpoint"
        raise ConfigError(explain("trainer.resume_mode", resume_mode, EXPECTED, fix))
    return path


def begin(root: Path, step: int) -> PendingCheckpoint:
    """Create a folder for the checkpoint of `step` under a temporary name."""
    # Unique, because ranks of an earlier attempt may still be writing to their folder.
    folder = root / f"global_step_{step}.{uuid.uuid4().hex[:8]}.tmp"
    folder.mkdir(parents=True)
    return PendingCheckpoint(root, step, folder)


def publish(pending: PendingCheckpoint) -> Path:
    """Make a written folder the checkpoint of its step, replacing an existing one."""
    folder, marker = pending.folder, pending.folder / MARKER
    fsync(*folder.rglob("*"))
    marker.write_text(json.dumps({"step": pending.step, "files": listed_files(folder)}) + "\n")
    fsync(marker, folder)
    final = step_folder(pending.root, pending.step)
    remove(final)
    os.replace(folder, final)
    fsync(pending.root)
    return final


def discard(pending: PendingCheckpoint) -> None:
    """Remove what was written of an unfinished checkpoint."""
    shutil.rmtree(pending.folder, ignore_errors=True)


def remove(step_dir: Path) -> None:
    """Delete a checkpoint, such that a half-deleted one is never taken for complete."""
    if not step_dir.exists():
        return
    doomed = step_dir.with_name(f"{step_dir.name}.{uuid.uuid4().hex[:8]}.tmp")
    (step_dir / MARKER).unlink(missing_ok=True)
    os.replace(step_dir, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean_up(root: Path) -> None:
    """Remove the half-written checkpoints of killed runs; the caller holds the lock of `root`."""
    for folder in sorted(root.glob("global_step_*.tmp")):
        match = TEMPORARY_NAME.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        final = step_folder(root, int(match.group(1)))
        if (folder / MARKER).is_file() and not is_complete(final):
            logger.info("%s is complete: renamed to %s", folder, final.name)
            remove(final)
            os.replace(folder, final)
        else:
            logger.info("%s was left half-written by a killed run: removed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, after: int) -> None:
    """Move an earlier run's checkpoints of steps above `after` into `set_aside/`."""
    later = [step_dir for step_dir in all_complete(root) if step_of(step_dir) > after]
    if after < 0 and (root / VALIDATION).is_dir():  # a fresh start
        later.append(root / VALIDATION)
    if later:
        folder = move_aside(root, later)
        names = ", ".join(path.name for path in later)
        logger.warning("moved the files of an earlier run to %s: %s", folder, names)
