"""Fake ranks and engines that only report where they run; a module that Ray's workers load fast."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.util import get_current_placement_group

from verl.config import Config

LIMIT_S = 60.0


class Part:
    """A rank or an engine, whose `load` ends only after the other kind has started loading."""

    def __init__(self, config: Config, own: str, other: str) -> None:
        self.folder, self.own, self.other = Path(config.trainer.default_local_dir), own, other

    def load(self) -> None:
        (self.folder / self.own).touch()
        end = time.monotonic() + LIMIT_S
        while not (self.folder / self.other).exists():
            assert time.monotonic() < end, f"{self.other} do not load while {self.own} do"
            time.sleep(0.05)

    def cards(self) -> tuple[str, ...]:
        return tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(","))


class Rank(Part):
    """Takes the arguments of `TrainerWorker`."""

    def __init__(self, config: Config, rank: int, size: int, *rest: Any) -> None:
        *_, self.num_others, group = rest
        super().__init__(config, "ranks" if group == "rank" else "critics", "engines")
        self.number = rank, size
        self.load()

    def facts(self) -> tuple[int, int, int]:
        """Return rank, size of the group, and ranks of the other group on this node."""
        return *self.number, self.num_others


class Replica(Part):
    """An engine that fails when it is told to sleep or to wake up."""

    def __init__(self, config: Config, *_: Any) -> None:
        super().__init__(config, "engines", "ranks")
        self.engine = SimpleNamespace(start_for_training=self.load, probe=lambda: None,
                                      sleep=self.refuse, wake_up=self.refuse)  # fmt: skip

    def refuse(self) -> None:
        raise AssertionError("an engine on its own GPUs neither sleeps nor wakes up")

    def is_in_placement_group(self) -> bool:
        return get_current_placement_group() is not None

    def dtype(self) -> str:
        return "bfloat16"
