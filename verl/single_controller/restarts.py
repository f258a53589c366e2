"""How often a run may lose a process and go on: one count, over engines and whole restarts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from verl.errors import UserError
from verl.types import Metrics

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """What was spent of `trainer.max_restarts` since the command began."""

    allowed: int
    of_replicas: int = 0
    of_run: int = 0

    def spend_on_replicas(self, error: UserError) -> None:
        """Count a restart of the engines; raises the error where no more are allowed."""
        self._spend(error, "all engines start again and repeat what they were asked")
        self.of_replicas += 1

    def spend_on_run(self, error: UserError, start: str) -> None:
        """Count a restart of everything from `start`; raises the error as above."""
        self._spend(error, f"the run starts again from {start}")
        self.of_run += 1

    def metrics(self) -> Metrics:
        """The counts so far."""
        counts = {"replica_restarts": self.of_replicas, "run_restarts": self.of_run}
        return {f"fault/{name}": float(count) for name, count in counts.items()}

    def _spend(self, error: UserError, what_follows: str) -> None:
        spent = self.of_replicas + self.of_run
        if spent >= self.allowed:
            raise type(error)(
                f"{error}; the run ends, after {spent} of trainer.max_restarts={self.allowed} "
                "restarts: find out why, then go on with trainer.resume_mode=auto"
            ) from error
        count = f"restart {spent + 1} of trainer.max_restarts={self.allowed}"
        logger.warning("%s; %s (%s)", error, what_follows, count)
