"""Whether a checkpoint's files are still as they were when its marker was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.checkpoint.names import MARKER, step_of
from verl.files import sha256
from verl.training.checkpoint_files import checkpoint_errors

HASHED_BYTES = 64 << 20
"""Largest size of files that are compared by content."""


def listed_files(folder: Path) -> dict[str, list[Any]]:
    """Return what a marker lists: by file, its size and its SHA-256, None above HASHED_BYTES."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): _size_and_hash(path) for path in files}


def check_files(step_dir: Path) -> None:
    """Raise ModelError if a checkpoint's files are not as its marker lists them."""
    marker = step_dir / MARKER
    with checkpoint_errors(marker):
        content = json.loads(marker.read_text())
        listed = {} if content == step_of(step_dir) else content["files"]  # {}: an old checkpoint
        for name, expected in listed.items():
            file = step_dir / name
            if not file.is_file() or _size_and_hash(file) != expected:
                raise ValueError(f"{name} is missing or has changed since it was written")


def _size_and_hash(file: Path) -> list[Any]:
    size = file.stat().st_size
    return [size, sha256(file) if size <= HASHED_BYTES else None]
