"""Demonstrations from a run's own trajectories: `python -m verl.sft.rejection_sampling`.

Reads the trajectories in `trainer.rollout_data_dir`, accepts the answered ones that scored well,
and writes them for `verl.sft.trainer` with their exact ids, so that nothing is encoded anew and the
masks are those of the run.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tyro

from verl.bounds import MAX_SEED
from verl.config.checks import beyond_limits, refuse
from verl.config.option import option
from verl.data.trajectories import (
    TOKENIZER,
    num_calls,
    number,
    read_header,
    read_rows,
    write_lines,
)
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

    min_score: float = option(1.0, resume="free")
    """The least value of the measure."""
    measure: str = "score"
    """What is judged: score, or one of its components (em), where a score is not only for right
    answers."""
    per_prompt: int = option(1, resume="free", ge=1)
    """How many trajectories of one question are kept at most, over all steps."""
    max_tokens: int | None = option(None, resume="free", ge=1)
    """Longest trajectory, prompt and observations included."""
    prefer: Literal["short", "few_searches", "random"] = "short"
    """Which of a question's trajectories come first: by tokens, by calls of tools, at random."""
    seed: int = option(0, resume="free", ge=0, le=MAX_SEED)
    """Seed of random, and of the order among equals."""


@dataclass(frozen=True, kw_only=True)
class Options(Criteria):
    """The command line."""

    rollouts: str
    """The run's trainer.rollout_data_dir."""
    out: str
    """Demonstrations to write, jsonl."""


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
            score=number(row["score"] if measure == "score" else row["components"][measure]),
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


def run(options: Options) -> Report:
    """Choose and write. Raises DataError when there is nothing to read or to keep."""
    tokenizer = read_header(options.rollouts)
    kept, report = choose(options.rollouts, options)
    if not kept:
        got = f"{report.read} trajectories, dropped {dict(report.dropped)}"
        fix = "lower --min-score, raise --max-tokens, or train longer"
        raise DataError(explain(f"rollouts {options.rollouts}", got, "one that is accepted", fix))
    write(options.out, tokenizer, kept)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry; prints the report as JSON and returns the exit code."""
    prog, description = "python -m verl.sft.rejection_sampling", (__doc__ or "").splitlines()[0]
    options = tyro.cli(Options, args=arguments, prog=prog, description=description)
    try:
        refuse(beyond_limits(options))
        report = run(options)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(vars(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
