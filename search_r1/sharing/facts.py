"""What a run's folder tells of its model: steps, options, fingerprints, validation. No torch.

Nothing is guessed: what a run did not write is None or empty, and its card does not mention it.
Paths and addresses of the machine stay out of it; files have their names only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.evaluation.summary import NUM_RESAMPLES, Interval, interval, ratio, resampled_sums
from search_r1.runs.folder import read_config
from verl.checkpoint.names import is_complete, step_of
from verl.data.records import read_jsonl
from verl.errors import ConfigError, DataError, explain
from verl.json_files import read_object

Row = Mapping[str, Any]
MEASURES = ("em", "score")
"""Measures of a validation that the card shows, and per set, where the run has them."""
ALL_SETS = "all sets"


@dataclass(frozen=True)
class Score:
    """A measure of one set of the last validation, with its interval over questions."""

    data_source: str
    measure: str
    value: float
    interval: Interval | None
    num_questions: int


@dataclass(frozen=True)
class RunFacts:
    """What the folder of a run tells of the model after `step`."""

    step: int
    config: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    """By name: data, validation, model (before training), tokenizer, and what its tools served."""
    curve: Sequence[Row]
    """Metrics of the steps that were validated, up to `step`."""
    scores: Sequence[Score]
    """Of the validation at `step`; empty if there was none."""
    evaluations: Sequence[tuple[Row, Row]] = field(default_factory=tuple)
    """Manifest and metrics of evaluations of the same weights."""


def run_folder(run: Path) -> tuple[Path, Path | None]:
    """Return a run's folder, and the checkpoint in it that is meant, if any. Raises ConfigError."""
    step_dir = run if run.name.startswith("global_step_") else None
    folder = run.parent if step_dir else run
    fix = "give the folder of a run, or a complete global_step_N in it"
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        got = "no such folder" if not run.is_dir() else "no config.yaml and metrics.jsonl"
        raise ConfigError(explain(str(run), got, "the folder of a run", fix))
    if step_dir and not is_complete(step_dir):
        raise ConfigError(explain(str(run), "an incomplete checkpoint", "a complete one", fix))
    if step_dir is None and not (folder / "model" / "config.json").is_file():
        complete = [path for path in folder.glob("global_step_*") if is_complete(path)]
        fix = f"push {max(complete, key=step_of)}" if complete else "let the run finish"
        raise ConfigError(explain(str(run), "no model/", "a run that has ended", fix))
    return folder, step_dir


def read_facts(folder: Path, step_dir: Path | None) -> RunFacts:
    """Read what is known of a run's model, or of that of its checkpoint. Raises ConfigError."""
    rows = [row for row in _rows(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]
    if not rows:
        fix = "give the folder of a run that took a step"
        raise ConfigError(explain(f"{folder}/metrics.jsonl", "no step", "steps of a run", fix))
    step = step_of(step_dir) if step_dir else max(row["step"] for row in rows)
    by_step = {row["step"]: row for row in rows if row["step"] <= step}  # a repeated one: the last
    curve = [row for _, row in sorted(by_step.items()) if any(f"val/{m}" in row for m in MEASURES)]
    state = folder / f"global_step_{step}" / "trainer_state.json"
    fingerprints = read_object(state).get("fingerprints", {}) if state.is_file() else {}
    scores = _scores(_rows(folder / "validation" / f"step_{step}.jsonl"))
    return RunFacts(step, read_config(folder), fingerprints, curve, scores)


def _rows(file: Path) -> list[Row]:
    """Return the rows of a file that the run wrote, of which there may be none."""
    if not file.is_file():
        return []
    rows = [row for _, row in read_jsonl(str(file))]
    if bad := next((row for row in rows if not isinstance(row, dict)), None):
        raise DataError(getattr(bad, "problem", f"{file}: a row that is no object"))
    return rows


def _scores(rows: Sequence[Row]) -> list[Score]:
    """Return the measures of a validation, of all sets and then of each, if there are several."""
    sources = sorted({str(row["data_source"]) for row in rows})
    sets: dict[str, Sequence[Row]] = {ALL_SETS: rows} if len(sources) != 1 and rows else {}
    sets |= {name: [row for row in rows if row["data_source"] == name] for name in sources}
    return [
        Score(name, measure, value, bounds, len(chosen))
        for name, chosen in sets.items()
        for measure in MEASURES
        if all(isinstance(row.get(measure), int | float) for row in chosen)
        for value, bounds in [_mean([float(row[measure]) for row in chosen])]
    ]


def _mean(values: Sequence[float]) -> tuple[float, Interval | None]:
    """Return a mean and its percentile interval over resampled questions, as evaluations have."""
    columns = np.stack([np.asarray(values), np.ones(len(values))], axis=1)
    resampled = resampled_sums(columns, NUM_RESAMPLES, [0, 0])
    return float(np.mean(values)), interval(ratio(resampled[:, 0], resampled[:, 1]))


def read_metrics(folder: Path) -> Row:
    """Read the `metrics.json` of an evaluation. Raises DataError."""
    try:
        return read_object(folder / "metrics.json")
    except (OSError, ValueError) as error:
        fix = "run the same evaluation again, which writes it at its end"
        raise DataError(explain(str(folder), error, "a finished evaluation", fix)) from error
