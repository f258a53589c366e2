"""What finishes started trajectories.

`verl.rollout.replicas` has the engines of a run. A decorator of `Rollouts` may stand between them
and whoever samples: `verl.ext.retry` samples failed trajectories again, `verl.ext.restart` replaces
lost engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.engine import Score
from verl.types import Sampling, Trajectory, TrajectoryKey


@dataclass(eq=False)
class RolloutRequest:
    """Started trajectories that engines are to finish."""

    starts: Sequence[Trajectory]
    sampling: Sampling
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Finished trajectories by their position in `starts`."""
    calls: dict[Any, tuple[int, list[int]]] = field(default_factory=dict)
    """Replica and positions of each pending call."""

    @property
    def replicas(self) -> dict[Any, int]:
        """The replica of each pending call."""
        return {call: replica for call, (replica, _) in self.calls.items()}

    @property
    def unfinished(self) -> list[int]:
        """Positions of the trajectories that are not finished."""
        return [i for i in range(len(self.starts)) if i not in self.finished]

    @property
    def trajectory_keys(self) -> list[TrajectoryKey]:
        """The key of each trajectory."""
        return [start.key for start in self.starts]

    def store(self, call: Any, trajectories: Sequence[Trajectory]) -> None:
        """Keep the result of a completed call."""
        _, positions = self.calls.pop(call)
        self.finished.update(zip(positions, trajectories, strict=True))

    def in_order(self) -> list[Trajectory]:
        """Return all finished trajectories in the order of `starts`."""
        return [self.finished[i] for i in range(len(self.starts))]


class Rollouts(Protocol):
    """Finishes started trajectories."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Start to finish `starts`, except for those `finished` (by position); return at once."""

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all trajectories are finished; return them in the order of their starts."""

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts` and return them in the same order."""
        return self.finish(self.start(starts, sampling))

    def sleep(self) -> None:
        """Free the engines' device memory for the training ranks."""


@dataclass
class Scores:
    """What engines score after they have loaded weights."""

    ids: Sequence[int] = ()
    """The sequence that each engine scores; empty: nothing."""
    answers: list[Score] = field(default_factory=list)
    """Scores that nobody has taken yet."""

    def take(self) -> list[Score]:
        """Return the scores that arrived since the last call."""
        taken, self.answers = self.answers, []
        return taken


class TrainedRollouts(Rollouts, Protocol):
    """Rollouts by engines that load the weights of the training ranks."""

    scores: Scores
    sent: Mapping[str, float]
    """Metrics of the last transfer of weights, besides its seconds."""

    def update_weights(self, policy: Any, version: int) -> dict[str, float]:
        """Have the engines load the weights that the ranks have now, under this number.

        Returns the seconds of each part.
        """

    def wake_up(self) -> None:
        """Allocate device memory again, before weights are updated or tokens generated."""

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Ask for the finished trajectories of requests that still run; return what waits for them.

        Nothing runs between steps, except where sampling overlaps with training.
        """
        return dict

    def call(self, method: str) -> Sequence[Any]:
        """Call a method of every replica, where it has one; return the results."""

    def shutdown(self) -> None:
        """Stop the engines."""
