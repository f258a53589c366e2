"""What each rank did in a step, by its own clock.

The seconds of a critic on devices of its own are found this way: its ranks compute while the driver
waits for others. `verl.ext.trace` draws all calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from verl.monitor.performance import CRITIC_PHASES
from verl.single_controller import calls
from verl.single_controller.calls import Call
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class RankCalls(Hook):
    """Takes the ranks' calls of a step, for the hooks after it."""

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the seconds of the critic's phases that the driver did not measure."""
        step = trainer.current
        step.calls = {
            f"{group.name} {number}": own
            for group in trainer.ranks.groups
            for number, own in enumerate(group.run(calls.take))
        }
        step.timings.concurrent |= concurrent_seconds(step.calls, step.timings.seconds)
        metrics |= {f"timing_s/{name}": s for name, s in step.timings.concurrent.items()}


def concurrent_seconds(
    calls: Mapping[str, Sequence[Call]], measured: Collection[str]
) -> dict[str, float]:
    """Return the seconds of the critic's phases that were not `measured`, as others ran meanwhile.

    They are those of the slowest rank, by the ranks' `calls` in a step.
    """

    def rank_seconds(rank_calls: Sequence[Call], method: str) -> float:
        return sum(call.end - call.begin for call in rank_calls if call.method == method)

    return {
        phase: max(rank_seconds(rank_calls, method) for rank_calls in calls.values())
        for phase, method in CRITIC_PHASES.items()
        if phase not in measured
    }


def hook(parts: Parts) -> RankCalls:
    """Return the hook of a run."""
    return RankCalls()
