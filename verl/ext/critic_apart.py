"""A critic on ranks of its own computes while those of the actor do (`critic.n_gpus_per_node`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.monitor.performance import Timings
from verl.trainer.hooks import Hook

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer
    from verl.trainer.ranks import TrainerRanks

CRITIC_WAIT = "wait_critic"
"""Name of the phase in which the actor's ranks wait for the critic."""


@dataclass(frozen=True)
class Meanwhile:
    """Starts the critic's work of a phase; see `verl.trainer.learn.CriticStarter`."""

    ranks: TrainerRanks

    def __call__(
        self, phase: str, begin: Callable[[], Callable[[], Any]], timings: Timings
    ) -> Callable[[], Any]:
        """Return a function that waits for the result, once the actor's ranks are done."""
        pending = begin()

        def wait() -> Any:
            with timings.phase(CRITIC_WAIT):
                result = pending()
            timings.record_peak(phase, self.ranks.take_peak_memory("critic"))
            return result

        return wait


class CriticApart(Hook):
    """Has the learner start its critic before the actor."""

    def on_start(self, trainer: RayPPOTrainer) -> None:
        """From the first step on."""
        trainer.learner.start_critic = Meanwhile(trainer.ranks)


def hook(parts: Parts) -> CriticApart | None:
    """Return the hook of a run whose critic has ranks of its own."""
    ranks = parts.ranks
    return None if ranks.group_of("critic") is ranks.group_of("actor") else CriticApart()
