"""The guard over a run: it says what is wrong, knows which checkpoints to trust, and what to do.

A checkpoint is healthy when the guard had nothing to say in the `patience` steps that followed it:
they sampled with its weights and learned from there. Its folder is then marked `HEALTHY`. What a
run under `action=rollback` starts from, and what it goes on from, is trusted at once.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint import folders
from verl.config import GuardConfig
from verl.errors import CollapseError
from verl.monitor.collapse import rules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a step: it is healthy where there are no reasons."""

    reasons: tuple[str, ...] = ()
    """One for each broken rule: metric, value, bound, baseline, how often in a row."""
    is_collapsed: bool = False
    """A rule was broken for as many steps as its patience; else a reason is a warning."""

    @property
    def health(self) -> str:
        """In a word."""
        if self.is_collapsed:
            return "collapsed"
        return "warning" if self.reasons else "healthy"

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass
class CollapseGuard:
    """Verdicts, trusted checkpoints and rollbacks of one run; `directory` holds its checkpoints."""

    config: GuardConfig
    directory: Path
    settle: Callable[[], None] = lambda: None
    """Waits for a checkpoint that is still being written."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Each watched metric at the latest healthy steps, oldest first."""
    broken: dict[str, int] = field(default_factory=dict)
    """How many steps in a row each rule was broken."""
    pending: list[int] = field(default_factory=list)
    """Steps of checkpoints that are not proven yet, in order."""
    healthy: int | None = None
    """Step of the last healthy checkpoint."""
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self.rules = rules(self.config)

    def judge(self, step: int, metrics: dict[str, float]) -> Verdict:
        """The verdict on a step, which is logged, added to `metrics`, and proves checkpoints."""
        if not self.config.enable:
            return Verdict()
        verdict = self.observe(metrics)
        metrics["guard/health"] = float(bool(verdict.reasons) + verdict.is_collapsed)
        metrics["guard/rollbacks"] = float(self.rollbacks)
        for reason in verdict.reasons:
            logger.warning("guard: step %d: %s: %s", step, verdict.health, reason)
        if verdict.reasons:
            self.pending.clear()
        while self.pending and step - self.pending[0] >= self.config.patience:
            self.trust(self.pending[0])
        return verdict

    def observe(self, metrics: Mapping[str, float]) -> Verdict:
        """The verdict on one step's metrics; steps come in order.

        A metric that a step lacks (no correct trajectory, no update) is not judged, and the count
        of its rules stays as it is.
        """
        reasons, is_collapsed = [], False
        for rule in self.rules:
            if (value := metrics.get(rule.metric)) is None:
                continue
            baseline = self.baseline(rule.metric)
            if not rule.is_broken(value, rule.bound(baseline)):
                self.broken.pop(rule.name, None)
                continue
            count = self.broken[rule.name] = self.broken.get(rule.name, 0) + 1
            is_collapsed |= count >= (rule.patience or 1)
            reasons.append(rule.reason(value, baseline, count))
        if not reasons:
            for metric in {rule.metric for rule in self.rules} & metrics.keys():
                values = [*self.history.get(metric, []), metrics[metric]]
                self.history[metric] = values[-self.config.baseline_steps :]
        return Verdict(tuple(reasons), is_collapsed)

    def baseline(self, metric: str) -> float | None:
        """Median over the latest healthy steps; None before the first."""
        values = self.history.get(metric)
        return statistics.median(values) if values else None

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is being written; the next steps will prove it."""
        self.pending.append(step)

    def trust(self, step: int) -> None:
        """Take the checkpoint of `step` for healthy from now on, if it is there."""
        self.settle()
        self.forget(step)
        if self._exists(step):
            self.healthy = step
            folders.mark_healthy(folders.step_folder(self.directory, step))

    def forget(self, step: int) -> None:
        """The checkpoint of `step` is not there, or needs no proof any more."""
        self.pending = [pending for pending in self.pending if pending != step]

    @property
    def needed(self) -> set[int]:
        """Steps whose checkpoints must stay: the healthy one, and the next one to be proven."""
        found = {self.pending[0]} if self.pending else set()
        return found if self.healthy is None else {*found, self.healthy}

    @property
    def wants_start(self) -> bool:
        """The run must save what it starts from: a rollback could have to go there."""
        rolls_back = self.config.enable and self.config.action == "rollback"
        return rolls_back and self.healthy is None

    @property
    def lr_scale(self) -> float:
        """Share of the configured learning rates that is left after the rollbacks so far."""
        return self.config.rollback_lr_factor**self.rollbacks

    def acts_on(self, verdict: Verdict) -> bool:
        """Whether the run cannot just go on."""
        return verdict.is_collapsed and self.config.action != "warn"

    def roll_back(self, step: int, verdict: Verdict) -> Path:
        """The checkpoint to go on from; counts the rollback.

        Raises CollapseError under `action=stop`, and when the rollbacks are used up.
        """
        if self.config.action != "rollback" or self.rollbacks >= self.config.max_rollbacks:
            raise CollapseError(self._message(step, verdict))
        assert self.healthy is not None, "a run that may roll back has saved what it started from"
        self.rollbacks += 1
        self.broken.clear()  # the baselines stay
        self.pending.clear()
        folder = folders.step_folder(self.directory, self.healthy)
        logger.warning("guard: step %d: back to %s, learning rates x %.3g (rollback %d of %d)",
                       step, folder, self.lr_scale, self.rollbacks,
                       self.config.max_rollbacks)  # fmt: skip
        return folder

    def _message(self, step: int, verdict: Verdict) -> str:
        """What happened, where the healthy weights are, and how to go on."""
        spent = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
        head = f"the policy collapsed at step {step}{spent}: {verdict}; "
        if self.healthy is None:
            return head + (
                "no checkpoint is known to be healthy: start anew with a lower "
                "actor_rollout_ref.actor.optim.lr, and trainer.save_freq to have checkpoints"
            )
        folder = folders.step_folder(self.directory, self.healthy)
        return head + (
            f"the last healthy checkpoint is {folder}; go on from it with "
            f"trainer.resume_mode={folder} and a lower actor_rollout_ref.actor.optim.lr"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {
            "history": self.history,
            "broken": self.broken,
            "pending": self.pending,
            "healthy": self.healthy,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, as far as the checkpoints are still here."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.broken = dict(state["broken"])
        self.pending = [step for step in state["pending"] if self._exists(step)]
        self.healthy = state["healthy"] if self._exists(state["healthy"]) else None
        self.rollbacks = state["rollbacks"]

    def _exists(self, step: int | None) -> bool:
        if step is None:
            return False
        return folders.is_complete(folders.step_folder(self.directory, step))
