"""Turns the results of all runs into a Markdown table, and compares runs with and without mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.algorithms.runner import Result

THRESHOLD = 0.75
MASK_PAIRS = (("grpo", "grpo_no_mask"), ("ppo", "ppo_no_mask"))
MISSING = "–"


def steps_to(curve: Sequence[tuple[int, float]], threshold: float = THRESHOLD) -> int | None:
    """Return the first validated step with an EM of at least `threshold`, or None."""
    return next((step for step, em in curve if em >= threshold), None)


def mean_and_range(values: Sequence[float], digits: int) -> str:
    """Format as `mean (lowest to highest)`, or as the mean alone if there is one value."""
    low, high = (f"{limit:.{digits}f}" for limit in (min(values), max(values)))
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def steps_cell(results: Sequence[Result]) -> str:
    """Format the steps to the threshold, and the number of seeds that did not reach it."""
    reached = [float(step) for r in results if (step := steps_to(r.curve)) is not None]
    if not reached:
        return "never"
    cell = mean_and_range(reached, 0)
    missed = len(results) - len(reached)
    return cell if not missed else f"{cell}, {missed} of {len(results)} never"


COLUMNS: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "seeds": lambda results: str(len(results)),
    "final EM": lambda results: mean_and_range([r.final_em for r in results], 3),
    f"steps to {THRESHOLD} EM": steps_cell,
    "sampled EM": lambda results: mean_and_range([r.sampled_em for r in results], 3),
    "KL, nats per token": lambda results: mean_and_range([r.kl for r in results], 3),
    "entropy, nats per token": lambda results: mean_and_range([r.entropy for r in results], 3),
    "searches per answer": lambda results: mean_and_range([r.searches for r in results], 2),
    "wall s": lambda results: mean_and_range([r.wall_seconds for r in results], 0),
}
"""Functions that format a variant's cell, by column."""

MEASURES: Mapping[str, tuple[Callable[[Result], float], Callable[[Sequence[Result]], str]]] = {
    "final EM": (lambda r: r.final_em, COLUMNS["final EM"]),
    "sampled EM": (lambda r: r.sampled_em, COLUMNS["sampled EM"]),
    "steps": (lambda r: -(steps_to(r.curve) or math.inf), steps_cell),
}
"""Measures for judging the mask: a run's score (larger is better), and the format of a variant."""


def markdown(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the table with a row per variant, and below it the verdicts on the mask."""
    lines = ["| variant | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, seeds in results.items():
        cells = [cell(seeds) for cell in COLUMNS.values()] if seeds else [MISSING] * len(COLUMNS)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    verdicts = [mask_verdict(results, *pair) for pair in MASK_PAIRS]
    return "\n".join([*lines, "", *filter(None, verdicts)]) + "\n"


def mask_verdict(results: Mapping[str, Sequence[Result]], masked: str, unmasked: str) -> str:
    """List the measures in which training without the mask is clearly worse, and the others.

    Clearly worse: every seed without the mask is worse than every seed with it. Returns an empty
    string if one of the two variants has no result.
    """
    with_mask, without = results.get(masked), results.get(unmasked)
    if not with_mask or not without:
        return ""
    findings: dict[bool, list[str]] = {True: [], False: []}
    for name, (score, cell) in MEASURES.items():
        is_worse = max(map(score, without)) < min(map(score, with_mask))
        findings[is_worse].append(f"{name} ({cell(without)} against {cell(with_mask)})")
    clauses = []
    if findings[True]:
        clauses.append(f"clearly worse than `{masked}` in {', '.join(findings[True])}")
    if findings[False]:
        clauses.append(f"**not** clearly worse in {', '.join(findings[False])}")
    return f"- `{unmasked}` is {', and '.join(clauses)}."
