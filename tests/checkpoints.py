"""Checkpoints written by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.checkpoint import folders


@contextmanager
def writing(root: Path, step: int) -> Iterator[Path]:
    """A folder that becomes `global_step_N` when the body is done, as a `Saver` makes it."""
    part = folders.begin(root, step)
    yield part.folder
    folders.publish(part)
