"""A campaign over one run: wait for each fault's moment, strike, and see what follows."""

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

from tests.proofs.campaign.faults import Fault, Kind
from tests.proofs.campaign.world import Strike
from tests.proofs.kills.__main__ import OverError, strike, until_over, wait_for
from tests.proofs.kills.schedule import Kill, Moment, Victim
from tests.proofs.kills.training import Training

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Effect:
    """A fault as it came about, and what followed."""

    number: int
    kind: str
    victim: str
    step: int
    """The last step whose metrics were logged."""
    met: bool
    """False where nothing of the run came across it."""
    status: int | None
    """Exit status of the run if it ended; None where it went on."""
    traceback: bool
    """Whether it ended with one, where a line is due."""
    log: str

    @property
    def outcome(self) -> str:
        """In words."""
        if not self.met:
            return "missed"
        if self.status is None:
            return "went on"
        return f"ended ({self.status}) {'with a traceback' if self.traceback else 'in one line'}"


@dataclass
class Watched(Training):
    """A run that keeps how each of its starts ended."""

    ends: list[tuple[int, bool, str]] = field(default_factory=list)
    """Exit status, whether a traceback was printed, and the log."""

    def start(self) -> None:
        """Keep how the last start ended, and begin again."""
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
    """One run and what can be done to the world that it stands on."""

    training: Watched
    strikes: Mapping[Kind, Strike]

    def strike(self, fault: Fault) -> bool:
        """Do what the fault says and undo it; whether the run can have met it."""
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
        """Do the run under `faults`; yields each and what followed. Raises KillsError.

        A run that ends well before its last fault ends the campaign.
        """
        training, open_effect = self.training, None
        training.start()
        for fault in faults:
            with contextlib.suppress(OverError):
                wait_for(training, self._due(fault))
            if open_effect is not None:
                yield self._settled(*open_effect)
                open_effect = None
            if training.status == 0:
                return
            rows = training.rows()
            step = int(rows[-1]["step"] or 0) if rows else 0
            ends = len(training.ends)
            open_effect = (fault, step, self.strike(fault), ends)
        until_over(training)
        if open_effect is not None:
            yield self._settled(*open_effect)

    def _due(self, fault: Fault) -> Fault:
        """At once only in a run that stands: one fault is not to be met by start after start."""
        self.training.rows()
        stands = self.training.status is None and self.training.since_row() is not None
        return (
            fault if stands or fault.moment is Moment.SAVING else replace(fault, moment=Moment.STEP)
        )

    def _settled(self, fault: Fault, step: int, met: bool, ends: int) -> Effect:
        ended = self.training.ends[ends:]
        status, traceback, log = ended[0] if ended else (None, False, "")
        victim = fault.victim.value if fault.victim else ""
        return Effect(fault.number, fault.kind.value, victim, step, met, status,
                      any(trace for _, trace, _ in ended) or traceback, log)  # fmt: skip


def touched(calm: Path, disturbed: Path) -> list[str]:
    """Trajectories trained on whose observations are not what was found without faults.

    Both folders hold a run's `trainer.rollout_data_dir`. Compared is the first segment that
    differs: an observation after equal text of the policy was touched; another text of the policy
    is another sample, after which nothing can be compared.
    """
    found = []
    for path in sorted(disturbed.glob("step_*.jsonl")):
        expected = {_key(row): row["segments"] for row in _rows(calm / path.name)}
        for row in _rows(path):
            pairs = zip(expected.get(_key(row), []), row["segments"], strict=False)
            different = next((b for a, b in pairs if a["ids"] != b["ids"]), None)
            if different is not None and different["origin"] == "observation":
                found.append(f"{path.stem} {row['uid']}/{row['sample']}")
    return found


def other_prompts(calm: Path, disturbed: Path) -> list[str]:
    """Steps whose prompts, groups and samples are not the same in both folders."""
    return [path.stem for path in sorted(calm.glob("step_*.jsonl"))
            if _starts(path) != _starts(disturbed / path.name)]  # fmt: skip


def _starts(path: Path) -> Counter[tuple[object, ...]]:
    return Counter((*_key(row), row["uid"]) for row in _rows(path))


def oldest(rollouts: Path) -> int:
    """By how many versions a token was older than the weights that its step began with.

    Those have the step's number. Prompts and observations have no version.
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
