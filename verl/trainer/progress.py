"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from verl.trainer.cluster import uses_gpus
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Progress(Hook):
    """Shows steps, score and, on GPUs, the GPU-hours used and expected."""

    _bar: tqdm[NoReturn] | None = None

    def __init__(self, num_gpus: int) -> None:
        """`num_gpus`: GPUs of the run, 0 on a CPU."""
        self.num_gpus = num_gpus

    @contextmanager
    def running(self, trainer: RayPPOTrainer) -> Iterator[None]:
        """Close the bar at the end."""
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Show the bar from the first step on."""
        if self._bar is None:
            total, done = trainer.total_steps, trainer.step
            self._bar = tqdm(total=total, initial=done, desc="train", unit="step")

    def on_step_end(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Advance by one step."""
        if self._bar is not None:
            elapsed, first = self._bar.format_dict["elapsed"], self._bar.initial
            share = (trainer.step - first) / (trainer.total_steps - first)
            hours = gpu_hours(self.num_gpus, elapsed, share)
            self._bar.set_postfix({"score": f"{metrics['critic/score/mean']:.3f}", **hours})
            self._bar.update()


def hook(parts: Parts) -> Progress:
    """Return the hook of a run."""
    config = parts.config
    return Progress(config.placement.num_gpus if uses_gpus(config) else 0)


def gpu_hours(num_gpus: int, elapsed_s: float, share: float) -> dict[str, str]:
    """Return GPU-hours used and their expected total, if `share` of the run took `elapsed_s`."""
    hours = num_gpus * elapsed_s / 3600
    return {"gpu_h": f"{hours:.2f}/{hours / share:.2f}"} if num_gpus else {}
