"""`python -m tests.nightly.proofs.campaign --faults 200 --seed 0 --out DIR` (`make campaign`).

One run is undisturbed. The same run then meets faults of every kind, and is started again with the
same command whenever it stops. The result is a table of what each kind of fault did, a comparison
of metrics and weights with the undisturbed run, the trajectories trained on that a fault had
changed, and what was left on the machine. Full disks, lost permissions and lost nodes need root; a
clock that jumps needs a C compiler. Without them, these faults are reported as not run.

With `--staleness K` (`make campaign STALENESS=K`) the runs sample K steps ahead of time. Then two
runs differ by timing alone. So a third run replays the schedule of the disturbed one undisturbed,
and its metrics and weights must be equal; the prompts of each step must still be those of the
undisturbed run, and no token may be older than K versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.algorithms.runner import ROOT
from tests.compare import differences, read_rows, same_weights
from tests.nightly.proofs.campaign.faults import Kind, plan
from tests.nightly.proofs.campaign.run import (
    Campaign,
    Effect,
    RecordedTraining,
    changed_trajectories,
    max_age,
    other_prompts,
)
from tests.nightly.proofs.campaign.world import LEGS
from tests.nightly.proofs.kills.__main__ import KillsError, left_over, undisturbed
from tests.nightly.proofs.kills.processes import shared_memory
from tests.nightly.proofs.kills.training import Training, command
from tests.test_retriever_failures import searching_model
from verl.ext.replay import FOLDER

OPTIONS = ("trainer.n_gpus_per_node=1", "retriever.timeout=3", "retriever.max_retries=3",
           "trainer.test_freq=0", "trainer.keep_last=2")  # fmt: skip
"""One rank starts faster than two; timeouts are short, so that hangs are noticed in time."""
ON_A_PROCESS = (Kind.KILL, Kind.FREEZE)
SHARES = {"retriever": 0.71, "machine": 0.27, "nodes": 0.02}
"""Share of the faults in each leg; a lost node takes a minute."""
STEPS = {"retriever": 0.7, "machine": 1.6, "nodes": 4.0}
"""Steps per fault, so that the run does not end before its last fault."""

console = Console(soft_wrap=True)
AnyTraining = TypeVar("AnyTraining", bound=Training)


@dataclass
class Report:
    """Result of a campaign, with the evidence."""

    leg: str
    seed: int
    seconds: float
    starts: int
    steps: int
    effects: list[Effect]
    not_run: list[str]
    missing_steps: list[int]
    differences: int
    """Number of metrics that differ from the undisturbed run, or from the replay."""
    same_weights: bool
    touched: list[str]
    """Trajectories trained on that a fault had changed."""
    broken: list[str]
    """Checkpoints that were resumed from although they were never complete."""
    left: list[str]
    """Processes and shared memory that outlived the run."""
    other_prompts: list[str] = field(default_factory=list)
    """Steps that trained on other prompts than the undisturbed run."""
    staleness: int = 0
    oldest: int = 0
    """Maximum age of a token that was trained on, in weight versions."""
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        """Decide the result; only faults of the retriever may leave rounding differences."""
        lost = self.missing_steps or self.touched or self.broken or self.left or self.other_prompts
        lost = lost or self.oldest > self.staleness
        exact = self.leg == "retriever" or (self.same_weights and not self.differences)
        self.holds = exact and not lost and not any(effect.traceback for effect in self.effects)


def campaign(
    leg: str, num_faults: int, seed: int, out: Path, steps: int, patience: float, staleness: int
) -> Report:
    """Do the runs of one leg and compare them. Raises KillsError if one does not finish."""
    started, before = time.monotonic(), shared_memory()
    base = Path(searching_model(out / "base"))
    make_world, kinds = LEGS[leg]
    with make_world(out) as world:

        def training(kind: type[AnyTraining], folder: Path, *more: str) -> AnyTraining:
            options = [*OPTIONS, *world.options, f"trainer.rollout_data_dir={folder / 'rollouts'}"]
            options += [f"actor_rollout_ref.rollout.max_staleness={staleness}", *more]
            words = world.command(command(folder, base, world.url, steps, options))
            return kind(folder, words, patience=patience)

        possible = [kind for kind in kinds if kind in world.strikes or kind in ON_A_PROCESS]
        calm, disturbed = training(Training, out / "calm"), training(RecordedTraining, world.folder)
        replay = f"actor_rollout_ref.rollout.replay={world.folder / FOLDER}"
        same = training(Training, out / "repeated", replay) if staleness else calm
        effects = []
        try:
            step_seconds = undisturbed(calm)
            console.print(f"undisturbed: {steps} steps of {step_seconds:.1f} s")
            faults = plan(num_faults, seed, possible, step_seconds)
            for effect in Campaign(disturbed, world.strikes).effects(faults):
                console.print(f"{effect.number:4} step {effect.step:4} {effect.kind} "
                              f"{effect.victim}: {effect.outcome} {effect.log}")  # fmt: skip
                effects.append(effect)
            if same is not calm:
                console.print(f"schedule replayed: {undisturbed(same):.1f} s a step")
            left = [line for run in (calm, disturbed, same) for line in left_over(run, before)]
        finally:
            for run in (calm, disturbed, same):
                run.stop()
            for log in disturbed.folder.glob("start_*.log"):
                shutil.copy(log, out)
        rows = disturbed.rows()
        logged = {int(row["step"] or 0) for row in rows}
        # With staleness, repeated steps were sampled by a schedule that was superseded.
        counted = read_rows(disturbed.folder / "metrics.jsonl") if staleness else rows
        different = list(differences(same.rows(), counted))
        for d in different:
            console.print(f"step {d.step} {d.name}: {d.got}, expected {d.expected}")
        complete = disturbed.complete() | {f"global_step_{step}" for step in logged}
        return Report(
            leg=leg, seed=seed, seconds=time.monotonic() - started, starts=disturbed.starts,
            steps=steps, effects=effects,
            not_run=[kind.value for kind in kinds if kind not in possible],
            missing_steps=sorted(set(range(1, steps + 1)) - logged),
            differences=len(different),
            same_weights=same_weights(same.folder / "model", disturbed.folder / "model"),
            touched=changed_trajectories(same.folder / "rollouts", disturbed.folder / "rollouts"),
            broken=[name for name in disturbed.resumed() if name not in complete],
            left=sorted(set(left)), staleness=staleness,
            other_prompts=other_prompts(calm.folder / "rollouts", disturbed.folder / "rollouts"),
            oldest=max_age(disturbed.folder / "rollouts"),
        )  # fmt: skip


def markdown(report: Report) -> str:
    """Return the faults by kind as a table, and the result."""
    by_kind = Counter((effect.kind, effect.outcome) for effect in report.effects)
    lines = ["| fault | what happened | times |", "| --- | --- | --- |"]
    lines += [f"| {kind} | {outcome} | {n} |" for (kind, outcome), n in sorted(by_kind.items())]
    lines += [f"| {kind} | not run: needs root or a compiler | 0 |" for kind in report.not_run]
    lines += [
        "",
        f"{report.leg}: {len(report.effects)} faults, seed {report.seed}, {report.steps} steps, "
        f"{report.starts} starts, {report.seconds / 60:.1f} minutes. Steps that are missing: "
        f"{len(report.missing_steps)}; metrics that differ: {report.differences}; weights "
        f"{'the same, bit for bit' if report.same_weights else 'not the same bit for bit'}; "
        f"trajectories trained on that a fault had changed: {len(report.touched)}; broken "
        f"checkpoints resumed from: {len(report.broken)}; steps with other prompts: "
        f"{len(report.other_prompts)}; oldest token: {report.oldest} versions, of "
        f"{report.staleness} allowed; left on the machine: "
        f"{', '.join(report.left) or 'nothing'}. {'HOLDS' if report.holds else 'DOES NOT HOLD'}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; returns 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description="Faults of every kind over real runs.")
    parser.add_argument("--faults", type=int, default=200, help="in all, over the legs")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments")
    parser.add_argument("--legs", nargs="+", choices=list(LEGS), default=list(LEGS))
    parser.add_argument("--staleness", type=int, default=0, help="max_staleness of the runs")
    parser.add_argument("--steps", type=int, help="of each run; enough if left out")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a step")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "campaign")
    args = parser.parse_args(arguments)
    if args.out.exists():
        sys.exit(f"{args.out} holds another campaign: remove it or give another --out")
    total_share = sum(SHARES[leg] for leg in args.legs)
    held = True
    for leg in args.legs:
        out = (args.out / leg).resolve()
        out.mkdir(parents=True)
        num_faults = round(SHARES[leg] / total_share * args.faults)
        steps = args.steps or 5 + round(STEPS[leg] * num_faults)
        try:
            report = campaign(leg, num_faults, args.seed, out, steps, args.patience, args.staleness)
        except KillsError as error:
            sys.exit(str(error))
        (out / "report.json").write_text(json.dumps(asdict(report), indent=1) + os.linesep)
        (out / "table.md").write_text(markdown(report))
        console.print(markdown(report), markup=False)
        held = held and report.holds
    console.print(f"seed {args.seed}: {'nothing was lost' if held else 'see above'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
