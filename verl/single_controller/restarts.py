"""How often a run may lose a process and go on: one count, over replicas and whole restarts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from verl.errors import SearchR1Error
from verl.trainer.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """What was spent of `trainer.max_restarts` since the command began."""

    allowed: int
    of_replicas: int = 0
    of_run: int = 0

    @property
    def spent(self) -> int:
        """Restarts of both kinds."""
        return self.of_replicas + self.of_run

    def spend_on_replica(self, error: SearchR1Error) -> None:
        """Count the restart of a replica; raises the error where no more are allowed."""
        self._refuse_more(error)
        self.of_replicas += 1
        logger.warning("%s; it is started again (%s)", error, str(self))

    def spend_on_run(self, error: SearchR1Error, goes_on_from: str) -> None:
        """Count a restart of everything; raises the error where no more are allowed."""
        self._refuse_more(error)
        self.of_run += 1
        logger.warning("%s; the run starts again from %s (%s)", error, goes_on_from, str(self))

    def metrics(self) -> Metrics:
        """The counts so far."""
        return {
            "fault/replica_restarts": float(self.of_replicas),
            "fault/run_restarts": float(self.of_run),
        }

    def _refuse_more(self, error: SearchR1Error) -> None:
        if self.spent >= self.allowed:
            raise type(error)(
                f"{error}; the run ends, after {self.spent} of trainer.max_restarts={self.allowed} "
                "restarts: find out why, then go on with trainer.resume_mode=auto"
            ) from error

    def __str__(self) -> str:
        return f"restart {self.spent} of trainer.max_restarts={self.allowed}"
