"""Finished trajectories of later steps in a checkpoint: `ahead.jsonl`, one trajectory per line.

Written by runs that sample ahead of time (`rollout.max_staleness`). Prompts are left out: they are
read from the data again. Log-probs are stored exactly, to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from verl.training.checkpoint_files import checkpoint_errors
from verl.types import Origin, Segment, Status, Timeline, Trajectory, TrajectoryKey

FILE = "ahead.jsonl"


class FinishedTrajectory(BaseModel, ser_json_inf_nan="constants"):
    """A finished trajectory without its prompt."""

    group: str
    sample: int
    replica: int
    status: Status
    stats: dict[str, float]
    faults: dict[str, int | float]
    segments: tuple[Segment, ...]

    @classmethod
    def from_trajectory(cls, key: TrajectoryKey, trajectory: Trajectory) -> Self:
        """Raise ValidationError if a user's own agent put values of other types in."""
        group, sample = key
        return cls(
            group=group, sample=sample, replica=trajectory.timeline.replica,
            status=trajectory.status, stats=trajectory.stats, faults=trajectory.faults,
            segments=tuple(map(replace, trajectory.segments)),  # `replace` unpacks packed columns
        )  # fmt: skip

    @property
    def versions(self) -> set[int]:
        """Versions of the weights that sampled it."""
        sampled = (segment for segment in self.segments if segment.origin is Origin.POLICY)
        return {segment.weight_version for segment in sampled}

    def to_trajectory(self, start: Trajectory) -> Trajectory | None:
        """Return the trajectory with the prompt of `start`, or None if the prompt has changed."""
        if not self.segments or self.segments[0].ids != start.segments[0].ids:
            return None
        return replace(start, segments=list(self.segments), status=self.status, stats=self.stats,
                       faults=self.faults, timeline=Timeline(self.replica))  # fmt: skip


def write(step_dir: Path, finished: Mapping[TrajectoryKey, Trajectory], newest: int) -> None:
    """Write the trajectories that did not fail and have no tokens of versions above `newest`."""
    with (step_dir / FILE).open("w", encoding="utf-8") as file:
        for key, trajectory in finished.items():
            # A trajectory with other types, from a user's own agent, is sampled again instead.
            with contextlib.suppress(ValidationError, PydanticSerializationError):
                entry = FinishedTrajectory.from_trajectory(key, trajectory)
                if entry.status is not Status.FAILED and max(entry.versions, default=0) <= newest:
                    file.write(f"{entry.model_dump_json()}\n")


def read(step_dir: Path) -> dict[TrajectoryKey, FinishedTrajectory]:
    """Read the finished trajectories of a checkpoint, if it has any. Raises ModelError."""
    path = step_dir / FILE
    if not path.exists():
        return {}
    with checkpoint_errors(path), path.open(encoding="utf-8") as file:
        entries = map(FinishedTrajectory.model_validate_json, file)
        return {(entry.group, entry.sample): entry for entry in entries}
