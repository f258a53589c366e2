"""Demonstrations out of a run's own trajectories: `python -m verl.sft.rejection_sampling`.

Reads what `trainer.rollout_data_dir` kept, accepts the answered trajectories that scored well, and
writes them for `verl.sft.trainer` with their exact ids, so that nothing is encoded anew and the
masks are those of the run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.data.trajectories import TOKENIZER, num_calls, read_header, read_rows, write_lines
from verl.errors import DataError, UserError, explain
from verl.types import Status


@dataclass(frozen=True)
class Candidate:
    """One accepted trajectory."""

    uid: str
    score: float
    """Of the measure that is judged."""
    step: int
    num_tokens: int
    num_policy_tokens: int
    num_calls: float
    segments: Sequence[Mapping[str, Any]]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for segment in self.segments for i in segment["ids"])


PREFERENCES: Mapping[str, Callable[[Candidate], tuple[float, ...]]] = MappingProxyType(
    {
        "short": lambda c: (c.num_policy_tokens,),
        "few_searches": lambda c: (c.num_calls, c.num_policy_tokens),
        "random": lambda c: (),
    }
)
"""What comes first among the accepted trajectories of one prompt; random is shuffled by seed."""


@dataclass(frozen=True)
class Criteria:
    """Which trajectories become demonstrations."""

    min_score: float = 1.0
    """The least value of `measure`."""
    measure: str = "score"
    """What is judged: the whole score, or one of its components (em), where a score is not only
    for right answers."""
    per_prompt: int = 1
    """At most so many of one question, over all steps."""
    max_tokens: int | None = None
    """Longest trajectory, prompt and observations included."""
    prefer: str = "short"
    """Which of a question's come first: short, few of tool calls, random."""
    seed: int = 0
    """Of random."""


@dataclass
class Report:
    """How many were read and kept, and why the others were not."""

    read: int = 0
    kept: int = 0
    prompts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def choose(directory: str | Path, criteria: Criteria) -> tuple[list[Candidate], Report]:
    """The trajectories to learn from, by question in order of appearance. Raises DataError."""
    report, by_prompt = Report(), defaultdict[str, list[Candidate]](list)
    seen: set[tuple[int, ...]] = set()
    for candidate in _accepted(directory, criteria, report):
        if candidate.ids in seen:
            report.dropped["duplicate"] += 1
            continue
        seen.add(candidate.ids)
        by_prompt[candidate.uid].append(candidate)
    kept = []
    for uid, candidates in by_prompt.items():
        random.Random(f"{criteria.seed}/{uid}").shuffle(candidates)  # ties fall by seed
        candidates.sort(key=PREFERENCES[criteria.prefer])
        kept += candidates[: criteria.per_prompt]
        report.dropped["over_per_prompt"] += len(candidates[criteria.per_prompt :])
    report.kept, report.prompts = len(kept), len(by_prompt)
    return kept, report


def write(path: str | Path, tokenizer: str, candidates: Sequence[Candidate]) -> None:
    """Demonstrations with exact ids; the file appears whole or not at all."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"uid": c.uid, "score": c.score, "step": c.step, TOKENIZER: tokenizer,
         "segments": list(c.segments)}
        for c in candidates
    ]  # fmt: skip
    write_lines(out, rows)


def _accepted(directory: str | Path, criteria: Criteria, report: Report) -> Iterator[Candidate]:
    for where, row in read_rows(directory):
        report.read += 1
        candidate, status = _candidate(where, row, criteria.measure)
        reason = _reason_against(candidate, status, criteria)
        if reason:
            report.dropped[reason] += 1
        else:
            yield candidate


def _candidate(where: str, row: Any, measure: str) -> tuple[Candidate, str]:
    """A row as a candidate, and how it ended. Raises DataError."""
    try:
        lengths = [(s["origin"], len(s["ids"])) for s in row["segments"]]
        candidate = Candidate(
            uid=str(row["uid"]),
            score=float(row["score"] if measure == "score" else row["components"][measure]),
            step=int(row["step"]),
            num_tokens=sum(length for _, length in lengths),
            num_policy_tokens=sum(length for origin, length in lengths if origin == "policy"),
            num_calls=num_calls(row["stats"]),
            segments=row["segments"],
        )
        return candidate, str(row["status"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"
        expected = f"a row as trainer.rollout_data_dir writes it, with {measure}"
        fix = "name a --measure that the run's reward logs, or delete the file"
        raise DataError(explain(where, got, expected, fix)) from error


def _reason_against(candidate: Candidate, status: str, criteria: Criteria) -> str:
    """Why a trajectory is not accepted; empty if it is."""
    if status != Status.ANSWERED:
        return "not_answered"
    if not candidate.score >= criteria.min_score:  # NaN is no score
        return "below_min_score"
    if criteria.max_tokens is not None and candidate.num_tokens > criteria.max_tokens:
        return "over_max_tokens"
    return ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m verl.sft.rejection_sampling",
                                     description=(__doc__ or "").splitlines()[0])  # fmt: skip
    default = Criteria()
    parser.add_argument("--rollouts", required=True, help="the run's trainer.rollout_data_dir")
    parser.add_argument("--out", required=True, help="demonstrations to write, jsonl")
    parser.add_argument("--min-score", type=float, default=default.min_score)
    parser.add_argument("--measure", default=default.measure, help="score, or a component: em")
    parser.add_argument("--per-prompt", type=_at_least_one, default=default.per_prompt)
    parser.add_argument("--max-tokens", type=_at_least_one, default=None)
    parser.add_argument("--prefer", choices=list(PREFERENCES), default=default.prefer)
    parser.add_argument("--seed", type=int, default=default.seed)
    return parser.parse_args(arguments)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)


def run(options: argparse.Namespace) -> Report:
    """Choose and write. Raises DataError when there is nothing to read or to keep."""
    criteria = Criteria(**{f.name: getattr(options, f.name) for f in fields(Criteria)})
    tokenizer = read_header(options.rollouts)
    kept, report = choose(options.rollouts, criteria)
    if not kept:
        got = f"{report.read} trajectories, dropped {dict(report.dropped)}"
        fix = "lower --min-score, raise --max-tokens, or train longer"
        raise DataError(explain(f"rollouts {options.rollouts}", got, "one that is accepted", fix))
    write(options.out, tokenizer, kept)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry; prints the report as JSON and returns the exit code."""
    try:
        report = run(parse(arguments))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(vars(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
