"""`python -m benchmarks.rivals.update MODEL ROLLOUTS`: our update against a plain padded loop.

With `--trl-python PATH`, an interpreter that has TRL, against TRL's GRPOTrainer: as it is, and
with its head scoring completions alone, as it does on GPUs. Both sides make the same updates on the
CPU: the trajectories of a run's `trainer.rollout_data_dir`, some questions an update, float32
weights computed with in bfloat16, AdamW, the same threads and malloc settings. Each side has a
process; they take turns, after one round to warm up. Tokens are those of the dialogues, whatever a
side computes of them or pads. Ours updates from every trajectory, and as in a run, which leaves
out those without an advantage: they have no gradient.
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

from benchmarks.rivals.our_update import RATE
from benchmarks.rivals.work import split, write
from verl.trainer.groups import cpu_env

ROOT = Path(__file__).resolve().parents[2]
OURS, TRL, PLAIN = "ours", "TRL", "plain loop"
WAYS = {OURS: ("", "as in a run"), TRL: ("", "completions scored alone"), PLAIN: ("",)}
"""How each of them does its work; `our_update` and `trl_update` know the second ways."""

UNITS = ("seconds", "cpu")

console = Console(soft_wrap=True, highlight=False)
Answer = dict[str, float]


class Contender:
    """A process that does what it is asked for, one piece at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def turn(self, number: int, way: str = "") -> Answer:
        """Its answer to the work of that number, done in that way."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number} {way}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{self._process.args!r} ended; its standard error says why"
        answer: Answer = json.loads(line)
        return answer


@contextmanager
def contender(command: Sequence[str], env: Mapping[str, str]) -> Iterator[Contender]:
    """A process of `command` in the repository's root."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Contender(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def commands(given: argparse.Namespace, work: Path) -> dict[str, list[str]]:
    """How both sides start."""
    at = ["--lr", str(given.lr)]
    loop = [str(work), "--micro", str(given.micro), *at]
    ours = [str(given.rollouts), "--questions", str(given.questions), *at]
    sides = {OURS: (sys.executable, "our_update", [*ours, "--budget", str(given.budget)])}
    if given.trl_python:
        sides[TRL] = (given.trl_python, "trl_update", loop)
    else:
        sides[PLAIN] = (sys.executable, "plain_update", loop)
    return {
        name: [python, "-m", f"benchmarks.rivals.{module}", str(given.model), *rest]
        for name, (python, module, rest) in sides.items()
    }


def spread(values: Sequence[float], digits: int) -> str:
    """Median, least and most."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report(answers: dict[str, list[Answer]], sizes: list[int], rates: list[Answer]) -> None:
    """Tokens/s, how many times as fast ours is in the same round, and the share of the machine."""
    console.print(f"{len(sizes)} updates of {min(sizes)} to {max(sizes)} tokens; median (range)")
    ours = {name: own for name, own in answers.items() if name.startswith(OURS)}
    for name, own in answers.items():
        speeds = [
            spread([size / one[unit] for size, one in zip(sizes, own, strict=True)], 0)
            for unit in UNITS
        ]
        norms = ", ".join(f"{one['grad_norm']:.3f}" for one in own)
        console.print(
            f"{name}: {speeds[0]} tokens/s, {speeds[1]} a processor second; "
            f"{own[-1]['peak_gib']:.1f} GiB; norms of the gradient {norms}"
        )
        for mine, found in ours.items() if name not in ours else ():
            ratios = [
                spread([their[unit] / my[unit] for their, my in zip(own, found, strict=True)], 2)
                for unit in UNITS
            ]
            console.print(f"  {mine} is {ratios[0]} times as fast, {ratios[1]} by the processor")
    for mine, found in ours.items():
        pairs = list(zip(found, rates, strict=True))
        shares = [
            spread([my["flops"] / my[unit] / rate[unit] for my, rate in pairs], 2) for unit in UNITS
        ]
        console.print(
            f"{mine}: {shares[0]} of the machine's matrix rate, {shares[1]} by the processor"
        )
    known = [spread([rate[unit] / 1e9 for rate in rates], 0) for unit in UNITS]
    console.print(f"which is {known[0]} GFLOP/s in bfloat16, {known[1]} a processor second")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--trl-python", help="an interpreter that has TRL")
    parser.add_argument("--questions", type=int, default=3, help="groups of an update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="our tokens at a time")
    parser.add_argument("--micro", type=int, default=6, help="the others' trajectories at a time")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--bare", action="store_true", help="others without our malloc settings")
    given = parser.parse_args()
    env = cpu_env()
    others = {name: env[name] for name in ("OMP_NUM_THREADS",)} if given.bare else env
    samples = split(given.rollouts, given.questions)
    if len(samples) <= given.rounds:
        sys.exit(f"got {len(samples)} updates' trajectories, expected more than --rounds")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sizes = write(samples, Path(folder, "work.json"))[1 : given.rounds + 1]
        rivals = {
            name: stack.enter_context(contender(command, env if name == OURS else others))
            for name, command in commands(given, Path(folder, "work.json")).items()
        }
        ways = [(name, way) for name in rivals for way in WAYS[name]]
        answers: dict[str, list[Answer]] = {", ".join(filter(None, one)): [] for one in ways}
        rates = []
        for number in range(given.rounds + 1):
            for (rival, way), (name, own) in zip(ways, answers.items(), strict=True):
                own.append(rivals[rival].turn(number, way))
                console.print(f"update {number}, {name}: {json.dumps(own[-1])}")
            rates.append(rivals[OURS].turn(RATE))
    report({name: own[1:] for name, own in answers.items()}, sizes, rates[1:])


if __name__ == "__main__":
    main()
