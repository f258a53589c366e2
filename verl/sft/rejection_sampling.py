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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from verl.bounds import MAX_SEED
from verl.config.known import limit_problems, raise_problems
from verl.config.option import option
from verl.data.trajectories import (
    TOKENIZER,
    num_calls,
    read_header,
    read_rows,
    to_float,
    write_jsonl,
)
from verl.errors import DataError, explain
from verl.logs import exit_status
from verl.types import Status


@dataclass(frozen=True)
class Candidate:
    """One trajectory of the run."""

    uid: str
    score: float
    """Of the measure that is judged."""
    step: int
    status: str
    num_policy_tokens: int
    num_calls: float
    ids: tuple[int, ...]
    segments: Sequence[Mapping[str, Any]]


PREFERENCES: Mapping[str, Callable[[Candidate], tuple[float, ...]]] = {
    "short": lambda c: (c.num_policy_tokens,),
    "few_searches": lambda c: (c.num_calls, c.num_policy_tokens),
    "random": lambda c: (),
}
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
    for where, row in read_rows(directory):
        report.read += 1
        candidate = _candidate(where, row, criteria.measure)
        reason = _reason_against(candidate, criteria) or "duplicate" * (candidate.ids in seen)
        if reason:
            report.dropped[reason] += 1
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
    write_jsonl(out, rows)


def _candidate(where: str, row: Any, measure: str) -> Candidate:
    """Raises DataError."""
    try:
        return Candidate(
            uid=str(row["uid"]),
            score=to_float(row["score"] if measure == "score" else row["components"][measure]),
            step=int(row["step"]),
            status=str(row["status"]),
            num_policy_tokens=sum(
                len(s["ids"]) for s in row["segments"] if s["origin"] == "policy"
            ),
            num_calls=num_calls(row["stats"]),
            ids=tuple(i for s in row["segments"] for i in s["ids"]),
            segments=row["segments"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"
        expected = f"a row as trainer.rollout_data_dir writes it, with {measure}"
        fix = "name a --measure that the run's reward logs, or delete the file"
        raise DataError(explain(where, got, expected, fix)) from error


def _reason_against(candidate: Candidate, criteria: Criteria) -> str:
    """Why a trajectory is not accepted; empty if it is."""
    if candidate.status != Status.ANSWERED:
        return "not_answered"
    if not candidate.score >= criteria.min_score:  # NaN is no score
        return "below_min_score"
    if criteria.max_tokens is not None and len(candidate.ids) > criteria.max_tokens:
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

    def work() -> None:
        raise_problems(limit_problems(options))
        sys.stdout.write(json.dumps(vars(run(options))) + "\n")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
