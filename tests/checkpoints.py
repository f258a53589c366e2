"""Helper that writes checkpoints in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.checkpoint import folders


@contextmanager
def writing(root: Path, step: int) -> Iterator[Path]:
    """Yield a folder that becomes `global_step_N` after the body, as with a `Saver`."""
    pending = folders.begin(root, step)
    yield pending.folder
    folders.publish(pending)
