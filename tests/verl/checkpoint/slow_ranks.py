"""Ranks for tests of a saver, and what follows its checkpoints."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.folders import RunState
from verl.errors import SaveError


class SlowRanks:
    """Ranks whose background write ends when `go_on` is set, and may fail."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.problem = ""
        self.can_copy = True
        self.is_writing = False
        self.calls: list[str] = []

    def save_checkpoint(self, directory: Path) -> None:
        self.calls.append("save")
        self._raise()

    def can_copy_checkpoint(self) -> bool:
        return self.can_copy

    def start_checkpoint(self, directory: Path) -> None:
        assert not self.is_writing, "two writes overlap"
        self.is_writing = True
        self.calls.append("start")

    def finish_checkpoint(self) -> None:
        assert self.go_on.wait(60)
        self.is_writing = False
        self._raise()

    def _raise(self) -> None:
        if self.problem:
            raise SaveError(self.problem)


def state(step: int, score: float | None = None) -> RunState:
    return RunState(step, {}, 0.0, score=score)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("global_step_*"))


@dataclass
class Watching:
    """Protects the given steps, and remembers those that were lost."""

    protected_steps: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)

    def on_saving(self, step: int) -> dict[str, Any]:
        return {}

    def on_saved(self, step: int) -> None: ...

    def drop_pending(self, step: int) -> None:
        self.lost.append(step)
