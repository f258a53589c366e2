"""Compare our update with a plain padded loop: `python -m benchmarks.rivals.update MODEL ROLLOUTS`.

With `--trl-python PATH`, an interpreter that has TRL, it is compared with TRL's GRPOTrainer: in its
default mode, and with logits computed only for the completions, as TRL does on GPUs. Both sides
make the same updates on the CPU: the trajectories of a run's `trainer.rollout_data_dir`, some
questions per update, float32 weights with computation in bfloat16, AdamW, the same threads and
malloc settings. Each side has its own process. They alternate after one round of warm-up. Tokens
per second count the tokens of the dialogues, however many a side computes or pads. Our side is
measured in two modes: on every trajectory, and as in a run, which leaves out trajectories without
an advantage, because they have no gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.rivals.tasks import MATRIX_RATE
from benchmarks.rivals.work import split, write
from verl.ext.cpu_env import cpu_env

ROOT = Path(__file__).resolve().parents[2]
OURS, TRL, PLAIN = "ours", "TRL", "plain loop"
MODES = {OURS: ("", "as in a run"), TRL: ("", "completions scored alone"), PLAIN: ("",)}
"""Modes of each worker. `our_update` and `trl_update` only check whether the mode is empty."""

UNITS = ("seconds", "cpu")

console = Console(soft_wrap=True, highlight=False)
Answer = dict[str, float]


class Worker:
    """A process that does one task at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, number: int, mode: str = "") -> Answer:
        """Have the process do task `number` in the given mode; returns its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number} {mode}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{self._process.args!r} ended; see its standard error"
        answer: Answer = json.loads(line)
        return answer


@contextmanager
def start_worker(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Worker]:
    """Run `command` in the repository's root as a worker, with `env` added to the environment."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def commands(args: argparse.Namespace, work: Path) -> dict[str, list[str]]:
    """Return the commands that start the workers, by name."""
    lr = ["--lr", str(args.lr)]
    rival_arguments = [str(work), "--micro", str(args.micro), *lr]
    our_arguments = [str(args.rollouts), "--questions", str(args.questions), *lr]
    our_arguments += ["--budget", str(args.budget)]
    workers = {OURS: (sys.executable, "our_update", our_arguments)}
    if args.trl_python:
        workers[TRL] = (args.trl_python, "trl_update", rival_arguments)
    else:
        workers[PLAIN] = (sys.executable, "plain_update", rival_arguments)
    return {
        name: [python, "-m", f"benchmarks.rivals.{module}", str(args.model), *arguments]
        for name, (python, module, arguments) in workers.items()
    }


def median_and_range(values: Sequence[float], digits: int) -> str:
    """Format as `median (minimum to maximum)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report(answers: dict[str, list[Answer]], sizes: list[int], rates: list[Answer]) -> None:
    """Print the speeds, our speed relative to the others in the same round, and FLOPs utilization.

    `answers`: by worker and mode, one per round; `sizes`: tokens of each round's update; `rates`:
    the machine's matrix rate in each round.
    """
    console.print(f"{len(sizes)} updates of {min(sizes)} to {max(sizes)} tokens; median (range)")
    ours = {name: rounds for name, rounds in answers.items() if name.startswith(OURS)}
    for name, rounds in answers.items():
        speeds = [
            median_and_range([size / a[unit] for size, a in zip(sizes, rounds, strict=True)], 0)
            for unit in UNITS
        ]
        norms = ", ".join(f"{answer['grad_norm']:.3f}" for answer in rounds)
        console.print(
            f"{name}: {speeds[0]} tokens/s, {speeds[1]} per processor second; "
            f"{rounds[-1]['peak_gib']:.1f} GiB; gradient norms {norms}"
        )
        for our_name, our_rounds in ours.items() if name not in ours else ():
            pairs = list(zip(rounds, our_rounds, strict=True))
            ratios = [median_and_range([a[unit] / b[unit] for a, b in pairs], 2) for unit in UNITS]
            console.print(
                f"  {our_name} is {ratios[0]} times as fast, {ratios[1]} by processor time"
            )
    for our_name, our_rounds in ours.items():
        pairs = list(zip(our_rounds, rates, strict=True))
        shares = [
            median_and_range([a["flops"] / a[unit] / rate[unit] for a, rate in pairs], 2)
            for unit in UNITS
        ]
        console.print(
            f"{our_name}: {shares[0]} of the machine's matrix rate, {shares[1]} by processor time"
        )
    gflops = [median_and_range([rate[unit] / 1e9 for rate in rates], 0) for unit in UNITS]
    console.print(f"matrix rate in bfloat16: {gflops[0]} GFLOP/s, {gflops[1]} per processor second")


def main() -> None:
    """Run all workers alternately, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--trl-python", help="an interpreter that has TRL")
    parser.add_argument("--questions", type=int, default=3, help="groups of an update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of our micro-batches")
    parser.add_argument(
        "--micro", type=int, default=6, help="trajectories of the other's micro-batches"
    )
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--bare", action="store_true", help="others without our malloc settings")
    args = parser.parse_args()
    our_env = cpu_env()
    rival_env = {"OMP_NUM_THREADS": our_env["OMP_NUM_THREADS"]} if args.bare else our_env
    updates = split(args.rollouts, args.questions)
    if len(updates) <= args.rounds:
        sys.exit(
            f"got trajectories for {len(updates)} updates in {args.rollouts}, expected more than "
            f"--rounds {args.rounds}; fix: record more steps, or give fewer --rounds or --questions"
        )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder, "work.json")
        sizes = write(updates, work)[1 : args.rounds + 1]
        workers = {
            name: stack.enter_context(start_worker(command, our_env if name == OURS else rival_env))
            for name, command in commands(args, work).items()
        }
        cases = [(name, mode) for name in workers for mode in MODES[name]]
        answers: dict[str, list[Answer]] = {", ".join(filter(None, case)): [] for case in cases}
        rates = []
        for number in range(args.rounds + 1):
            for (worker, mode), (name, rounds) in zip(cases, answers.items(), strict=True):
                rounds.append(workers[worker].run(number, mode))
                console.print(f"update {number}, {name}: {json.dumps(rounds[-1])}")
            rates.append(workers[OURS].run(MATRIX_RATE))
    report({name: rounds[1:] for name, rounds in answers.items()}, sizes, rates[1:])


if __name__ == "__main__":
    main()
