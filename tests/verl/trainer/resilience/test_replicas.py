"""What the hand-over of weights says of itself; lost replicas: see test_failures.py."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.trainer.resilience.replicas import RolloutReplicas
from verl.trainer.resilience.restarts import Restarts


class SlowEngines(RolloutReplicas):
    """Engines that need a while for what they are asked."""

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        if method == "take":
            time.sleep(0.03)
        return ["float32"]


class SlowRanks:
    """Ranks that say how much of their while they wrote."""

    def hand_over_weights(self, directory: Path, dtype: str) -> float:
        time.sleep(0.02)
        return 0.005

    def hand_over_adapter(self, directory: Path) -> float:
        return self.hand_over_weights(directory, "float32")


def test_the_parts_of_a_hand_over_add_up_to_it() -> None:
    """Ranks gather and write, then engines load; nothing is counted twice."""
    engines = SlowEngines([], None, [], Restarts(0))  # type: ignore[arg-type]
    for engines.takes_adapter in (False, True):
        start = time.perf_counter()
        parts = engines.update_weights(SlowRanks())
        whole = time.perf_counter() - start
        assert set(parts) == {"gather", "write", "load"}
        assert parts["write"] == 0.005
        assert parts["gather"] >= 0.015 and parts["load"] >= 0.03
        assert whole - 0.01 < sum(parts.values()) <= whole
