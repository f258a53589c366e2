"""Chooses among recorded trajectories, and writes those kept as demonstrations."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data import trajectories
from verl.data.trajectories import TOKENIZER, to_float
from verl.errors import DataError, explain
from verl.ext.sft.rejection_sampling import Criteria, Options
from verl.types import Status, num_calls


@dataclass(frozen=True)
class Candidate:
    """One recorded trajectory."""

    uid: str
    score: float
    """Value of the chosen measure (`Criteria.measure`)."""
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
"""Sort keys of the accepted trajectories of one prompt; ties are in random order."""


@dataclass
class Report:
    """Counts of the trajectories that were read and kept, and of the dropped ones by reason."""

    read: int = 0
    kept: int = 0
    prompts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def choose(directory: str | Path, criteria: Criteria) -> tuple[list[Candidate], Report]:
    """Choose the trajectories to train on, by question in order of appearance. Raises DataError."""
    report, by_prompt = Report(), defaultdict[str, list[Candidate]](list)
    seen: set[tuple[int, ...]] = set()
    for location, row in trajectories.read_rows(directory):
        report.read += 1
        candidate = _parse_candidate(location, row, criteria.measure)
        reason = _rejection_reason(candidate, criteria)
        if not reason and candidate.ids in seen:
            reason = "duplicate"
        if reason:
            report.dropped[reason] += 1
            continue
        seen.add(candidate.ids)
        by_prompt[candidate.uid].append(candidate)
    kept = []
    for uid, candidates in by_prompt.items():
        random.Random(f"{criteria.seed}/{uid}").shuffle(candidates)  # breaks ties by seed
        candidates.sort(key=PREFERENCES[criteria.prefer])
        kept += candidates[: criteria.per_prompt]
        report.dropped["over_per_prompt"] += max(0, len(candidates) - criteria.per_prompt)
    report.kept, report.prompts = len(kept), len(by_prompt)
    return kept, report


def write(path: str | Path, tokenizer: str, candidates: Sequence[Candidate]) -> None:
    """Write demonstrations with exact token ids, atomically."""
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"uid": c.uid, "score": c.score, "step": c.step, TOKENIZER: tokenizer,
         "segments": list(c.segments)}
        for c in candidates
    ]  # fmt: skip
    trajectories.write_jsonl(out, rows)


def _parse_candidate(location: str, row: Any, measure: str) -> Candidate:
    """Convert a recorded row. Raises DataError if it is malformed or lacks the measure."""
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
        fix = "choose a --measure that the run's reward logs, or delete the file"
        raise DataError(explain(location, got, expected, fix)) from error


def _rejection_reason(candidate: Candidate, criteria: Criteria) -> str:
    """Return why a trajectory is rejected; empty if it is accepted."""
    if candidate.status != Status.ANSWERED:
        return "not_answered"
    if not candidate.score >= criteria.min_score:  # also rejects NaN
        return "below_min_score"
    if criteria.max_tokens is not None and len(candidate.ids) > criteria.max_tokens:
        return "over_max_tokens"
    return ""


def run(options: Options) -> Report:
    """Choose and write demonstrations. Raises DataError if there are none to read or to keep."""
    tokenizer = trajectories.read_header(options.rollouts)
    kept, report = choose(options.rollouts, options)
    if not kept:
        got = f"{report.read} trajectories, dropped {dict(report.dropped)}"
        fix = "lower --min-score, raise --max-tokens, or train longer"
        raise DataError(explain(f"rollouts {options.rollouts}", got, "an accepted trajectory", fix))
    write(options.out, tokenizer, kept)
    return report
