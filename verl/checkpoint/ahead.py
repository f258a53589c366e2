"""Trajectories that are finished for later steps, in a checkpoint: `ahead.jsonl`, one a line.

Of a run that samples ahead (`rollout.max_staleness`). The prompts are not repeated: they are those
of the data. What is written is exact to the bit of every log-prob.
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
from verl.types import Origin, Segment, Status, Trajectory, TrajectoryKey

FILE = "ahead.jsonl"


class Finished(BaseModel, ser_json_inf_nan="constants"):
    """A trajectory without its prompt."""

    group: str
    sample: int
    greedy: bool
    replica: int
    status: Status
    stats: dict[str, float]
    faults: dict[str, int]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, name: TrajectoryKey, trajectory: Trajectory) -> Self:
        """Raises ValidationError where an agent of the user's own put in something else."""
        group, sample, greedy = name
        return cls(
            group=group, sample=sample, greedy=greedy, replica=trajectory.replica,
            status=trajectory.status, stats=trajectory.stats, faults=trajectory.faults,
            segments=tuple(map(replace, trajectory.segments)),  # with what is packed
        )  # fmt: skip

    @property
    def versions(self) -> set[int]:
        """Of the weights that sampled it."""
        spoken = (segment for segment in self.segments if segment.origin is Origin.POLICY)
        return {version for segment in spoken for version, _ in segment.version_runs}

    def of_start(self, start: Trajectory) -> Trajectory | None:
        """The trajectory again; None where the prompt is another than it was."""
        if not self.segments or self.segments[0].ids != start.segments[0].ids:
            return None
        return replace(start, segments=list(self.segments), status=self.status, stats=self.stats,
                       faults=self.faults, replica=self.replica)  # fmt: skip


def write(step_dir: Path, found: Mapping[TrajectoryKey, Trajectory], newest: int) -> None:
    """Keep those that no infrastructure broke, sampled by weights up to the version `newest`."""
    with (step_dir / FILE).open("w", encoding="utf-8") as file:
        for name, trajectory in found.items():
            # What a user's own agent made of other types is sampled again instead.
            with contextlib.suppress(ValidationError, PydanticSerializationError):
                row = Finished.of(name, trajectory)
                if row.status is not Status.FAILED and max(row.versions, default=0) <= newest:
                    file.write(f"{row.model_dump_json()}\n")


def read(step_dir: Path) -> dict[TrajectoryKey, Finished]:
    """What a checkpoint has; nothing where it has no such file. Raises ModelError."""
    path = step_dir / FILE
    if not path.exists():
        return {}
    with checkpoint_errors(path), path.open(encoding="utf-8") as file:
        rows = map(Finished.model_validate_json, file)
        return {(row.group, row.sample, row.greedy): row for row in rows}
