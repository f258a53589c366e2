"""The training loop, run by one driver process: sample, score, update, send the weights.

Who waits for whom in a step (time goes down):

    driver                        engines (rollouts)            ranks
      │ source.collect ─ start ──► dialogues with tools           │
      │        ◄── trajectories ──┘                               │
      │ rewards, batch                                            │
      │ learner.prepare ─────────────────────────────► log-probs, values
      │ advantages                                                │
      │ learner.update ──────────────────────────────► critic, policy
      │ send_weights ────────────► load  ◄──────────── gather     │
      │ hooks: validate, log, save, …

A source that samples ahead of time has dialogues running below all of this. Whatever is optional is
a hook (`verl.trainer.hooks`) or another source; `verl.trainer.run` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verl.batch import TokenBatch
from verl.monitor.performance import Timings
from verl.trainer.collect import Samples, Source
from verl.trainer.hooks import Hook, Hooks, Stateful, merged_state
from verl.trainer.learn import Learner, add_advantages, assemble
from verl.trainer.metrics import advantage_metrics, performance_metrics
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.config import Config
    from verl.rollout.rollouts import TrainedRollouts
    from verl.single_controller.calls import Call
    from verl.trainer.ranks import TrainerRanks


class Logger(Protocol):
    """Where a step's metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def rewind(self, step: int | None) -> None: ...


Transfer = Callable[["TrainerRanks", Any, int], dict[str, float]]
"""Sends the weights from ranks to engines, as a version; returns the seconds of each part."""


@dataclass
class Step:
    """The current step, for hooks to read."""

    timings: Timings = field(default_factory=Timings)
    samples: Samples = field(default_factory=Samples)
    batch: TokenBatch | None = None
    calls: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    """Each rank's calls in the step (`verl.ext.rank_calls`)."""


@dataclass
class RayPPOTrainer:
    """Trains a policy with PPO, GRPO or a related algorithm on training ranks and engines."""

    config: Config
    source: Source
    learner: Learner
    rollouts: TrainedRollouts | None
    """None in a run that samples nothing."""
    transfer: Transfer
    logger: Logger
    hooks: Sequence[Hook]
    total_steps: int
    step: int = field(init=False, default=0)
    """The current step, or the last finished one between steps."""
    version: int = field(init=False, default=0)
    """Version of the policy that the step's trajectories are sampled with; the first is 1."""
    current: Step = field(init=False, default_factory=Step)
    unfinished: Metrics | None = field(init=False, default=None)
    """Metrics of a resumed step whose updates are done, but not its validation and logging."""

    def __post_init__(self) -> None:
        self._all = Hooks(self.hooks)

    def fit(self) -> None:
        """Train to `total_steps` updates."""
        hooks = self._all
        with hooks.contexts("running", self):
            hooks.call("on_start", self)
            self.send_weights()
            hooks.call("on_ready", self)
            if self.unfinished is not None:
                self.finish_step(self.unfinished)
            while self.step < self.total_steps:
                hooks.call("on_step_begin", self)
                self.step += 1
                metrics = self.train_step()
                hooks.call("on_trained", self, metrics)
                self.finish_step(metrics)
            hooks.call("on_end", self)

    def train_step(self) -> Metrics:
        """Sample, score, estimate advantages, update, send the weights; returns the metrics."""
        timings = Timings(self.ranks.take_peak_memory)
        self.current = Step(timings)
        with self.during("collect"):
            samples, metrics = self.source.collect(self.step, timings)
        with self.during("learn"):
            batch = assemble(samples, self.config)
            self.current.samples, self.current.batch = samples, batch
            with self.during("prepare"):
                self.learner.prepare(batch, timings)
                with timings.phase("adv"):
                    metrics |= add_advantages(batch, self.config, self.learner.kl_controller)
            metrics |= advantage_metrics(batch)
            metrics |= self.learner.update(batch, self.step, timings)
        self._all.call("on_updated", self)
        with timings.phase("update_weights"):
            seconds = self.send_weights()
        timings.seconds |= {f"update_weights/{part}": s for part, s in seconds.items()}
        return metrics | performance_metrics(batch, timings, self.config.placement.num_gpus)

    def finish_step(self, metrics: Metrics) -> None:
        """Finish a step whose weights are final: validate, log, save."""
        self._all.call("on_metrics", self, metrics)
        self.log(metrics)
        self._all.call("on_step_end", self, metrics)

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Return the hooks' contexts of a phase."""
        return self._all.contexts("during", phase, self)

    def send_weights(self) -> dict[str, float]:
        """Send the policy's weights to the engines, if any; returns the seconds of each part."""
        self.version += 1
        if self.rollouts is None:
            return {}
        return self.transfer(self.ranks, self.rollouts, self.version)

    def log(self, metrics: Metrics) -> None:
        """Log metrics of the current step."""
        self.logger.log(metrics, self.step)

    @property
    def ranks(self) -> TrainerRanks:
        """The ranks that are trained."""
        return self.learner.ranks

    @property
    def parts(self) -> Sequence[Stateful]:
        """What has a state that checkpoints keep."""
        return (self.source, self.learner, *self.hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of a `RunState`."""
        return {"step": self.step, "version": self.version, **merged_state(self.parts)}
