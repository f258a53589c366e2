"""Folders of checkpoints: names, markers, the driver's part, and how they appear and go at once.

A folder under another name than `global_step_N`, or without `COMPLETE`, is never resumed from. What
a killed run left half-written is removed at the next start. A run holds its folder
(`verl.files`), so that no other run can be writing what looks half-written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter

from verl.errors import ConfigError, explain
from verl.files import fsync, move_aside
from verl.training.checkpoint_files import (
    checkpoint_errors,
    random_states,
    read_state_file,
    set_random_states,
)

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
HEALTHY = "HEALTHY"
STATE_FILE, DRIVER_FILE = "trainer_state.json", "ranks/driver.pt"
EXPECTED = f"global_step_N with {MARKER} inside"
"""A checkpoint, in the words of an error."""
HASHED_BYTES = 64 << 20
"""Up to which a checkpoint's file is compared by content; tensors have checksums of their own."""
STEP_NAME = re.compile(r"global_step_(\d+)")
PART_NAME = re.compile(r"global_step_(\d+)\.([0-9a-f]{8}\.)?tmp")
VALIDATION = "validation"
"""Folder of a run's validation dialogues, a file a step."""


@dataclass(frozen=True)
class Part:
    """A checkpoint that is being written."""

    root: Path
    step: int
    folder: Path
    began: float = field(default_factory=time.monotonic)
    """By the monotonic clock, in seconds."""


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return root / f"global_step_{step}"


def step_of(step_dir: Path) -> int:
    """The step that a checkpoint folder's name says."""
    match = STEP_NAME.fullmatch(step_dir.name)
    assert match is not None, f"got {step_dir.name}, expected global_step_N"
    return int(match.group(1))


def write_state(step_dir: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's own state, a JSON object."""
    (step_dir / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")


def read_state(step_dir: Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises ModelError."""
    with checkpoint_errors(step_dir / STATE_FILE):
        return dict(json.loads((step_dir / STATE_FILE).read_text()))


@dataclass(frozen=True)
class RunState:
    """Where a run stood after a finished step; JSON throughout."""

    step: int
    sampler: Mapping[str, Any]
    """The data position."""
    kl_coef: float
    reward: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    """`metric`, `value` and `step` of the best validation so far."""
    score: float | None = None
    """The best metric's value at this very step, where it was validated."""
    pending: Mapping[str, float] | None = None
    """Metrics of a step that was learned from but not yet validated and logged."""
    ahead: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Prompts that were drawn, and perhaps being sampled, for later steps."""
    version: int | None = None
    """Of the weights that engines were given after the step."""

    @classmethod
    def read(cls, step_dir: Path) -> Self:
        """A checkpoint's, which may hold more, and less if it is an old one. Raises ModelError."""
        with checkpoint_errors(step_dir / STATE_FILE):
            state = TypeAdapter(cls).validate_python(read_state(step_dir))
            if state.step != step_of(step_dir) or not math.isfinite(state.kl_coef):
                raise ValueError(f"it says step {state.step}, KL coefficient {state.kl_coef}")
            return state


def write_driver_random(step_dir: Path) -> None:
    """Keep the driver's random states."""
    (step_dir / DRIVER_FILE).parent.mkdir(exist_ok=True)
    torch.save(random_states(), step_dir / DRIVER_FILE)


def read_driver_random(step_dir: Path) -> None:
    """Bring the driver's random states back, where the checkpoint has them. Raises ModelError."""
    path = step_dir / DRIVER_FILE
    if path.exists():
        with checkpoint_errors(path):
            set_random_states(read_state_file(path))


def refuse_changes(step_dir: Path) -> None:
    """Refuse a checkpoint whose files are not as its marker lists them. Raises ModelError.

    The marker of an older one lists nothing.
    """
    marker = step_dir / MARKER
    with checkpoint_errors(marker):
        found = json.loads(marker.read_text())
        listed = {} if found == step_of(step_dir) else found["files"]
        for name, facts in listed.items():
            if facts != (_facts(step_dir / name) if (step_dir / name).is_file() else None):
                raise ValueError(f"{name} is not there as it was written")


def _facts(file: Path) -> list[Any]:
    """The bytes of a file and, unless there are many, their SHA-256."""
    size = file.stat().st_size
    with file.open("rb") as content:
        is_small = size <= HASHED_BYTES
        return [size, hashlib.file_digest(content, "sha256").hexdigest() if is_small else None]


def mark_healthy(step_dir: Path) -> None:
    """Mark a checkpoint whose weights the collapse guard trusts, so that it is kept."""
    (step_dir / HEALTHY).touch()


def is_complete(step_dir: Path) -> bool:
    """Whether the folder is a checkpoint whose writing ended."""
    return STEP_NAME.fullmatch(step_dir.name) is not None and (step_dir / MARKER).is_file()


def all_complete(root: Path) -> list[Path]:
    """The complete checkpoints below `root`, oldest step first."""
    return sorted(filter(is_complete, root.glob("global_step_*")), key=step_of)


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the highest step below `root`, if any."""
    return max(all_complete(root), key=step_of, default=None)


def resolve(resume_mode: str, root: Path) -> Path | None:
    """What `trainer.resume_mode` (disable, auto, a path) means; None to start anew.

    Raises ConfigError when a path is not a complete checkpoint.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        return latest(root)
    path = Path(resume_mode)
    if not is_complete(path):
        fix = "give auto, or the path of a complete checkpoint"
        raise ConfigError(explain("trainer.resume_mode", resume_mode, EXPECTED, fix))
    return path


def begin(root: Path, step: int) -> Part:
    """A new folder for checkpoint `step`; no other attempt's ranks ever write under its name."""
    folder = root / f"global_step_{step}.{uuid.uuid4().hex[:8]}.tmp"
    folder.mkdir(parents=True)
    return Part(root, step, folder)


def publish(part: Part) -> Path:
    """Make a written folder the checkpoint of its step, in place of one that was there."""
    folder, marker = part.folder, part.folder / MARKER
    fsync(*folder.rglob("*"))
    files = {str(path.relative_to(folder)): _facts(path)
             for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip
    marker.write_text(json.dumps({"step": part.step, "files": files}) + "\n")
    fsync(marker, folder)
    final = step_folder(part.root, part.step)
    remove(final)
    os.replace(folder, final)
    fsync(part.root)
    return final


def abandon(part: Part) -> None:
    """Remove what was written of a checkpoint that will not be one."""
    shutil.rmtree(part.folder, ignore_errors=True)


def remove(step_dir: Path) -> None:
    """Delete a checkpoint; at no moment is it there in part, nor taken for whole."""
    if not step_dir.exists():
        return
    gone = step_dir.with_name(f"{step_dir.name}.{uuid.uuid4().hex[:8]}.tmp")
    (step_dir / MARKER).unlink(missing_ok=True)
    os.replace(step_dir, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what killed runs left half-written below `root`, whose lock the caller holds.

    A folder whose marker was written, but which was not renamed yet, becomes a checkpoint.
    """
    for folder in sorted(root.glob("global_step_*.tmp")):
        match = PART_NAME.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        final = step_folder(root, int(match.group(1)))
        if (folder / MARKER).is_file() and not is_complete(final):
            logger.info("%s was written to its end: it is %s", folder, final.name)
            remove(final)
            os.replace(folder, final)
        else:
            logger.info("%s is the rest of a run that was killed: removed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, after: int) -> None:
    """Move checkpoints of steps above `after` into `set_aside/`; before step 0, validations too.

    A run that starts before them would else be taken for the one that wrote them.
    """
    later = [step_dir for step_dir in all_complete(root) if step_of(step_dir) > after]
    later += [root / VALIDATION] * (after < 0 and (root / VALIDATION).is_dir())
    if later:
        place = move_aside(root, later)
        logger.warning("of an earlier run, now in %s: %s", place, ", ".join(p.name for p in later))
