"""Runs a campaign: waits for each fault's moment, causes it, and records what happens."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tests.nightly.proofs.campaign.faults import Fault, Kind
from tests.nightly.proofs.campaign.world import Strike
from tests.nightly.proofs.kills.__main__ import OverError, strike, until_over, wait_for
from tests.nightly.proofs.kills.schedule import Kill, Moment, Victim
from tests.nightly.proofs.kills.training import Training

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Effect:
    """A fault that was caused, and what happened."""

    number: int
    kind: str
    victim: str
    step: int
    """The last step whose metrics were logged."""
    met: bool
    """Whether the run was affected by it."""
    status: int | None
    """Exit status of the run if it ended; None if it continued."""
    traceback: bool
    """Whether it ended with a traceback instead of one line."""
    log: str

    @property
    def outcome(self) -> str:
        """Description of what happened."""
        if not self.met:
            return "missed"
        if self.status is None:
            return "continued"
        return f"ended ({self.status}) {'with a traceback' if self.traceback else 'in one line'}"


@dataclass
class RecordedTraining(Training):
    """A run that records how each of its starts ended."""

    ends: list[tuple[int, bool, str]] = field(default_factory=list)
    """Exit status, whether a traceback was printed, and the log."""

    def start(self) -> None:
        """Record how the last start ended, and start again."""
        if self.process is not None:
            log = self.log_path(self.starts)
            text = log.read_text(errors="replace")
            self.ends.append((self.process.wait(), ends_badly(text), log.name))
        super().start()


def ends_badly(log: str) -> bool:
    """Whether the run itself printed a traceback.

    vLLM logs one of its own, marked with its process, when its engine core was killed.
    """
    return any(line.startswith(TRACEBACK) for line in log.replace("\r", "\n").split("\n"))


@dataclass
class Campaign:
    """A run, and the faults that its world can cause."""

    training: RecordedTraining
    strikes: Mapping[Kind, Strike]

    def strike(self, fault: Fault) -> bool:
        """Cause a fault and undo it; returns whether the run may have been affected."""
        if fault.kind in self.strikes:
            return self.strikes[fault.kind](fault, self.training)
        assert fault.victim is not None, f"nothing here does {fault.kind}"
        if fault.kind is Kind.KILL:
            strike(self.training, Kill(fault.number, fault.victim, fault.moment, fault.delay))
            return True
        return self._freeze(fault, fault.victim)

    def _freeze(self, fault: Fault, victim: Victim) -> bool:
        victims = self.training.find(victim)
        if not victims:
            return False
        process = victims[fault.number % len(victims)]
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            time.sleep(fault.seconds)
            process.resume()
        return True

    def effects(self, faults: Sequence[Fault]) -> Iterator[Effect]:
        """Run under `faults`; yield each fault with what happened. Raises KillsError.

        The campaign ends if the run finishes before its last fault.
        """
        training, open_effect = self.training, None
        training.start()
        for fault in faults:
            with contextlib.suppress(OverError):
                wait_for(training, self._due(fault))
            if open_effect is not None:
                yield self._effect(*open_effect)
                open_effect = None
            if training.status == 0:
                return
            step, ends = training.last_step(), len(training.ends)
            open_effect = (fault, step, self.strike(fault), ends)
        until_over(training)
        if open_effect is not None:
            yield self._effect(*open_effect)

    def _due(self, fault: Fault) -> Fault:
        """Delay a fault to the next step if the run is starting, so that it hits only one start."""
        self.training.rows()
        is_training = self.training.status is None and self.training.since_row() is not None
        if is_training or fault.moment is Moment.SAVING:
            return fault
        return replace(fault, moment=Moment.STEP)

    def _effect(self, fault: Fault, step: int, met: bool, ends: int) -> Effect:
        ended = self.training.ends[ends:]
        status, _, log = ended[0] if ended else (None, False, "")
        victim = fault.victim.value if fault.victim else ""
        return Effect(fault.number, fault.kind.value, victim, step, met, status,
                      any(trace for _, trace, _ in ended), log)  # fmt: skip


def changed_trajectories(calm: Path, disturbed: Path) -> list[str]:
    """Return the trajectories trained on whose observations were changed by a fault.

    Both folders are a run's `trainer.rollout_data_dir`. The first segment that differs decides: an
    observation after equal policy text was changed by a fault; other policy text is another sample,
    after which nothing can be compared.
    """
    changed = []
    for path in sorted(disturbed.glob("step_*.jsonl")):
        expected = {_key(row): row["segments"] for row in _rows(calm / path.name)}
        for row in _rows(path):
            pairs = zip(expected.get(_key(row), []), row["segments"], strict=False)
            different = next((b for a, b in pairs if a["ids"] != b["ids"]), None)
            if different is not None and different["origin"] == "observation":
                changed.append(f"{path.stem} {row['uid']}/{row['sample']}")
    return changed


def other_prompts(calm: Path, disturbed: Path) -> list[str]:
    """Return the steps whose prompts, groups and samples differ between the folders."""
    return [path.stem for path in sorted(calm.glob("step_*.jsonl"))
            if _starts(path) != _starts(disturbed / path.name)]  # fmt: skip


def _starts(path: Path) -> Counter[tuple[object, ...]]:
    return Counter((*_key(row), row["uid"]) for row in _rows(path))


def max_age(rollouts: Path) -> int:
    """Return the maximum age of a token in weight versions, when its step was trained.

    A step starts with weights of its own number. Prompts and observations have no version.
    """
    ages = [0]
    for path in rollouts.glob("step_*.jsonl"):
        for row in _rows(path):
            versions = [s["weight_version"] for s in row["segments"] if "weight_version" in s]
            ages += [row["step"] - version for version in versions]
    return max(ages)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _key(row: dict[str, Any]) -> tuple[object, object]:
    return row["group"], row["sample"]
