"""`python -m tests.nightly.proofs.kills --kills 20 --out DIR`: the proof that nothing is lost.

One run is undisturbed. The same run is then killed with SIGKILL again and again, and started again
with the same command whenever it does not recover by itself. At the end, the metrics of every step
and the trained weights must equal those of the undisturbed run, bit for bit; no half-written
checkpoint may have been resumed from, and nothing of the run may be left on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import psutil
from rich.console import Console

from benchmarks.algorithms.runner import BASE, ROOT, retriever
from tests.compare import Difference, differences, same_weights
from tests.nightly.proofs.kills.phases import phase_of
from tests.nightly.proofs.kills.processes import held, shared_memory
from tests.nightly.proofs.kills.schedule import Kill, Moment, Victim, plan
from tests.nightly.proofs.kills.training import Training, command
from verl.machine import SHARED_MEMORY

POLL_S = 0.02
GONE_S = 60.0
"""Seconds that processes may outlive their run."""

console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Death:
    """A kill that was carried out."""

    number: int
    victim: str
    step: int
    """The last step whose metrics were logged."""
    phase: str
    newest: str
    """The newest complete checkpoint at that moment; empty for none."""
    was_saving: bool
    pid: int


@dataclass
class Report:
    """Result of the proof, with the evidence."""

    command: list[str]
    deaths: list[Death]
    outcomes: list[str]
    """What happened after each kill."""
    starts: int
    resumed: list[str]
    broken: list[str]
    """Checkpoints that were resumed from although they were never complete."""
    num_rows: int
    """Number of logged steps, including repeated ones."""
    differences: list[Difference]
    same_weights: bool
    left: list[str]
    """Processes and shared memory that outlived the run."""
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether nothing was lost."""
        return self.same_weights and not (self.differences or self.broken or self.left)


class KillsError(Exception):
    """The run did not finish."""


class OverError(KillsError):
    """The run finished before the moment of the next fault."""


class Due(Protocol):
    """A fault with its number and the moment at which it is due."""

    @property
    def number(self) -> int: ...
    @property
    def moment(self) -> Moment: ...
    @property
    def delay(self) -> float: ...


def until_over(training: Training) -> None:
    """Start the run as often as necessary until it succeeds. Raises KillsError if it does not."""
    deadline = time.monotonic() + training.patience
    while training.status != 0:
        if time.monotonic() > deadline:
            log = training.log_path(training.starts)
            raise KillsError(f"no end within {training.patience:.0f} s; see {log}")
        if training.status is not None:
            training.start()
        time.sleep(POLL_S)


def undisturbed(training: Training) -> float:
    """Run without interruption; return the median seconds of a step.

    Raises KillsError if the run fails, or takes longer than its patience for a step.
    """
    training.start()
    deadline, rows = time.monotonic() + training.patience, 0
    while training.status is None and time.monotonic() < deadline:
        if len(training.rows()) > rows:
            deadline, rows = time.monotonic() + training.patience, len(training.rows())
        time.sleep(POLL_S)
    if training.status != 0:
        late = f"had no step within {training.patience:.0f} s"
        problem = late if training.status is None else "failed"
        raise KillsError(f"the undisturbed run {problem}; see {training.log_path(1)}")
    return median(float(row.get("timing_s/step") or 0) for row in training.rows()[1:])


def wait_for(training: Training, kill: Due) -> None:
    """Wait for the moment of a fault, starting the run again if it has ended."""
    rows, deadline = len(training.rows()), time.monotonic() + training.patience
    while time.monotonic() < deadline:
        if training.status == 0:
            raise OverError(f"the run ended before kill {kill.number}: give it more --steps")
        if training.status is not None:
            training.start()
        if kill.moment is Moment.START:
            break
        has_moved = len(training.rows()) > rows
        if has_moved and (kill.moment is Moment.STEP or training.is_saving()):
            break
        time.sleep(POLL_S if not has_moved else POLL_S / 10)
    else:
        raise KillsError(f"kill {kill.number} never came; see {training.log_path(training.starts)}")
    time.sleep(kill.delay)


def strike(training: Training, kill: Kill) -> Death:
    """Kill a process of the planned kind, as soon as there is one."""
    deadline = time.monotonic() + training.patience
    while not (found := training.find(kill.victim)):
        if time.monotonic() > deadline or training.status == 0:
            raise KillsError(f"kill {kill.number}: there was no {kill.victim}")
        if training.status is not None:
            training.start()
        time.sleep(POLL_S)
    victim = found[kill.number % len(found)]
    rows, newest = training.rows(), max(training.complete(), key=_step_of, default="")
    was_saving = training.is_saving()
    phase = phase_of(training.since_row(), rows, was_saving)
    step = training.last_step()
    victim.kill()
    return Death(kill.number, kill.victim.value, step, phase, newest, was_saving, victim.pid)


def disturbed(training: Training, kills: Sequence[Kill]) -> Iterator[tuple[Death, str]]:
    """Run under `kills`; yields each of them and what happened afterwards."""
    training.start()
    death, starts = None, 1
    for kill in kills:
        wait_for(training, kill)
        if death is not None:
            yield death, _outcome(training, starts)
        starts = training.starts
        death = strike(training, kill)
        if kill.victim is Victim.DRIVER and training.process is not None:
            training.process.wait()
        console.print(death)
    until_over(training)
    if death is not None:
        yield death, _outcome(training, starts)


def _outcome(training: Training, starts: int) -> str:
    return "recovered by itself" if training.starts == starts else "restarted by the command"


def left_over(training: Training, before: set[str]) -> list[str]:
    """Return the processes and shared memory that are left some time after the end of the run."""
    deadline = time.monotonic() + GONE_S
    remains = []
    for family in training.relatives:
        left = family.wait_gone(max(0.0, deadline - time.monotonic()))
        remains += [f"process {process.pid}: {_name(process)}" for process in left]
    new = shared_memory() - before
    return remains + [str(SHARED_MEMORY / name) for name in sorted(new - held(new))]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.NoSuchProcess:
        return "just gone"


def _step_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def prove(calm: Training, killed: Training, num_kills: int, seed: int) -> Report:
    """Do both runs and compare them. Raises KillsError if one does not finish."""
    started, before = time.monotonic(), shared_memory()
    deaths, outcomes = [], []
    try:
        step_seconds = undisturbed(calm)
        console.print(f"undisturbed: steps of {step_seconds:.1f} s")
        for death, outcome in disturbed(killed, plan(num_kills, seed, step_seconds)):
            deaths.append(death)
            outcomes.append(outcome)
        left = left_over(calm, before) + left_over(killed, before)
    finally:
        calm.stop()
        killed.stop()
    once_complete = killed.complete() | {death.newest for death in deaths}
    resumed, rows = killed.resumed(), killed.rows()
    return Report(
        command=list(killed.command), deaths=deaths, outcomes=outcomes, starts=killed.starts,
        resumed=resumed, broken=[name for name in resumed if name not in once_complete],
        num_rows=len(rows), differences=list(differences(calm.rows(), rows)),
        same_weights=same_weights(calm.folder / "model", killed.folder / "model"),
        left=left, seconds=time.monotonic() - started,
    )  # fmt: skip


def markdown(report: Report) -> str:
    """Return the kills as a table, and the result."""
    lines = ["| kill | last step | victim | phase | what happened |", "| --- " * 5 + "|"]
    for d, outcome in zip(report.deaths, report.outcomes, strict=True):
        lines.append(f"| {d.number} | {d.step} | {d.victim} | {d.phase} | {outcome} |")
    lines += [
        "",
        f"{len(report.deaths)} kills, {report.starts} starts, "
        f"{report.seconds / 60:.0f} minutes. {report.num_rows} rows of metrics (steps that were "
        f"repeated count twice), {len(report.differences)} metrics that differ; trained weights "
        f"{'the same, bit for bit' if report.same_weights else 'DIFFER'}; "
        f"{len(report.resumed)} checkpoints resumed from, {len(report.broken)} of them broken; "
        f"left on the machine: {', '.join(report.left) or 'nothing'}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proof; returns 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description="Kill a training run again and again.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--steps", type=int, help="of the run; 3 for each kill if left out")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for a step or start")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "kills")
    parser.add_argument("options", nargs="*", help="options of the trainer, key=value")
    args = parser.parse_args(arguments)
    out = args.out.resolve()
    if (out / "killed").exists():
        sys.exit(f"{out} holds another proof: remove it or give another --out")
    num_steps = args.steps or max(5, 3 * args.kills)
    with retriever() as url:
        calm, killed = (
            Training(folder, command(folder, BASE, url, num_steps, args.options), args.patience)
            for folder in (out / "undisturbed", out / "killed")
        )
        try:
            report = prove(calm, killed, args.kills, args.seed)
        except KillsError as error:
            sys.exit(str(error))
    (out / "report.json").write_text(json.dumps(asdict(report), indent=1) + os.linesep)
    (out / "table.md").write_text(markdown(report))
    console.print(markdown(report), markup=False)
    for difference in report.differences[:20]:
        console.print(difference)
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
