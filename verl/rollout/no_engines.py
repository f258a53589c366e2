"""What stands for the replicas in a run that learns from recorded trajectories alone."""

from __future__ import annotations

from verl.rollout.in_flight import Engines


class NoEngines(Engines):
    """Takes no weights, and counts their versions all the same: those of the record are held
    against them. It is asked for no trajectory."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the format in which the trained policy is written."""
        self.version, self.dtype = 0, dtype

    def update_weights(self, policy: object) -> dict[str, float]:
        """Nobody waits for them."""
        self.version += 1
        return {}

    def wake_up(self) -> None:
        """Nothing sleeps."""

    def shutdown(self) -> None:
        """Nothing runs."""
