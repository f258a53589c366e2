"""How a checkpoint's folder is called, and whether it is complete; without torch."""

import re
from pathlib import Path

MARKER = "COMPLETE"
STEP_NAME = re.compile(r"global_step_(\d+)")


def step_of(step_dir: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    match = STEP_NAME.fullmatch(step_dir.name)
    assert match is not None, f"got {step_dir.name}, expected global_step_N"
    return int(match.group(1))


def is_complete(step_dir: Path) -> bool:
    """Whether a folder is a completely written checkpoint."""
    return STEP_NAME.fullmatch(step_dir.name) is not None and (step_dir / MARKER).is_file()
