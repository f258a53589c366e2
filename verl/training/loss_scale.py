"""The factor that lifts gradients into what float16 can hold.

Below 6e-8 a float16 is 0, above 65,504 infinite. So the loss is multiplied before backward, and
the gradient, which FSDP sums in float32, divided again before anything looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

GROWTH_INTERVAL = 2000
"""Finite gradients in a row after which a larger factor is tried."""


@dataclass
class LossScale:
    """The factor of one engine, by the rule and the constants of `torch.amp.GradScaler`."""

    value: float = 65536.0
    """A power of two always, so that dividing by it rounds nothing."""
    num_finite: int = 0
    """Finite gradients in a row with this factor."""

    def observe(self, is_finite: bool) -> None:
        """Halve after a gradient that is not finite, double after enough that are."""
        if not is_finite:
            self.value, self.num_finite = self.value / 2, 0
            return
        self.num_finite += 1
        if self.num_finite == GROWTH_INTERVAL:
            self.value, self.num_finite = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.value, self.num_finite = state["value"], state["num_finite"]
