"""Trajectories on their way: asked for at one time, and taken when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.types import Name, Sampling, Trajectory


@dataclass(eq=False)
class InFlight:
    """Started trajectories that engines are finishing."""

    starts: Sequence[Trajectory]
    sampling: Sampling
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By position in `starts`."""
    calls: dict[Any, int] = field(default_factory=dict)
    """The replica of each call that is not answered yet."""

    @property
    def left(self) -> list[int]:
        """Positions of those that are not finished."""
        return [i for i in range(len(self.starts)) if i not in self.finished]

    @property
    def names(self) -> list[Name]:
        """Of each start."""
        return names_of(self.starts, self.sampling)

    def in_order(self) -> list[Trajectory]:
        """All of them, finished, in the order of `starts`."""
        return [self.finished[i] for i in range(len(self.starts))]


def names_of(starts: Sequence[Trajectory], sampling: Sampling) -> list[Name]:
    """What the trajectories of one request are known by."""
    return [(start.group, start.sample, sampling.temperature == 0) for start in starts]


class Engines:
    """Whatever finishes trajectories; this one does it when they are taken."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> InFlight:  # fmt: skip
        """Begin to finish `starts`, and return at once; some, by position, may be `finished`."""
        return InFlight(starts, sampling, dict(finished or {}))

    def finish(self, flight: InFlight) -> list[Trajectory]:
        """Wait until all are finished; they come in the order of their starts."""
        left = flight.left
        new = self.generate([flight.starts[i] for i in left], flight.sampling)
        flight.finished.update(zip(left, new, strict=True))
        return flight.in_order()

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts`, in their order."""
        return self.finish(self.start(starts, sampling))

    def unanswered(self) -> Callable[[], Mapping[Name, Trajectory]]:
        """Ask for what is finished of flights that are not; the function waits for the answer, also
        in another thread."""
        return dict

    def abandon(self, flight: InFlight) -> None:
        """Nobody waits for these any more."""

    def busy_share(self) -> float | None:
        """The share of the time since the last call in which an engine sampled, where known."""
        return None

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""
