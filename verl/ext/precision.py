"""Training in float16: the loss is scaled, since a float16 below 6e-8 is 0, above 65,504 infinite.

Models in other dtypes never get here (`verl.training.fsdp.TRAINING_IN`).
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from verl.training.fsdp import FsdpModel, StepResult

STATE = "loss_scales"
"""Name of the loss scale among a model's further state, and in checkpoints."""
GROWTH_INTERVAL = 2000
"""Consecutive finite gradients after which the loss scale is doubled."""


@dataclass
class LossScale:
    """The factor of a model's loss, by the rule and constants of `torch.amp.GradScaler`."""

    value: float = 65536.0
    """Always a power of two, so that neither product nor division rounds."""
    num_finite: int = 0
    """Consecutive finite gradients with this scale."""

    def update(self, is_finite: bool) -> None:
        """Halve the scale after a gradient that is not finite, double it after many that are."""
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
        elif self.num_finite == GROWTH_INTERVAL:
            self.value, self.num_finite = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.num_finite = state["value"], state["num_finite"]


@dataclass(frozen=True)
class ScaledStep(StepResult):
    """Outcome of an optimizer step whose gradient was that of a scaled loss."""

    loss_scale: float
    is_overflow: bool
    """Skipped only because the loss scale was too large; it is halved, and the run is fine."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics; an overflow has no gradient norm."""
        metrics = super().metrics()
        if self.is_overflow:
            del metrics["grad_norm"]
        overflows = float(self.is_overflow)
        return metrics | {"loss_scale": self.loss_scale, "overflowed_updates": overflows}


def scale_loss(model: FsdpModel) -> None:
    """Let `model` scale its loss before backward, and the gradient back before any use of it."""
    scale, backward, step = LossScale(), model.backward, model.step

    def scaled_backward(loss: Tensor, is_last: bool = True) -> None:
        backward(loss * scale.value, is_last)

    def scaled_step(is_finite: bool = True) -> ScaledStep:
        model.reshard()
        for parameter in model.trained_parameters().values():
            if parameter.grad is not None:
                parameter.grad.div_(scale.value)
        result, factor = step(is_finite), scale.value
        is_overflow = is_finite and result.is_faulty and factor > 1
        if is_finite:
            scale.update(is_finite=not result.is_faulty)
        is_faulty = result.is_faulty and not is_overflow
        return ScaledStep(result.grad_norm, result.lr, is_faulty, factor, is_overflow)

    vars(model).update(backward=scaled_backward, step=scaled_step)
    model.more_state[STATE] = scale
