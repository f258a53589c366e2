"""From the results of all runs to one markdown table, and to what it says of the mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.algorithms.runner import Result

THRESHOLD = 0.75
MASK_PAIRS = (("grpo", "grpo_no_mask"), ("ppo", "ppo_no_mask"))
MISSING = "–"


def steps_to(curve: Sequence[tuple[int, float]], threshold: float = THRESHOLD) -> int | None:
    """The first validated step whose EM is at least `threshold`; None if there is none."""
    return next((step for step, em in curve if em >= threshold), None)


def mean_and_range(values: Sequence[float], digits: int) -> str:
    """`mean (lowest to highest)`; the mean alone where there is one value."""
    low, high = (f"{edge:.{digits}f}" for edge in (min(values), max(values)))
    centre = f"{sum(values) / len(values):.{digits}f}"
    return centre if len(values) == 1 else f"{centre} ({low} to {high})"


def steps_cell(results: Sequence[Result]) -> str:
    """Steps to the threshold of the seeds that reached it, and how many did not."""
    found = [steps_to(result.curve) for result in results]
    reached = [float(step) for step in found if step is not None]
    if not reached:
        return "never"
    cell = mean_and_range(reached, 0)
    missed = len(found) - len(reached)
    return cell if not missed else f"{cell}, {missed} of {len(found)} never"


COLUMNS: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "seeds": lambda found: str(len(found)),
    "final EM": lambda found: mean_and_range([r.final_em for r in found], 3),
    f"steps to {THRESHOLD} EM": steps_cell,
    "sampled EM": lambda found: mean_and_range([r.sampled_em for r in found], 3),
    "KL, nats per token": lambda found: mean_and_range([r.kl for r in found], 3),
    "entropy, nats per token": lambda found: mean_and_range([r.entropy for r in found], 3),
    "searches per answer": lambda found: mean_and_range([r.searches for r in found], 2),
    "wall s": lambda found: mean_and_range([r.wall_seconds for r in found], 0),
}

MEASURES: Mapping[str, tuple[Callable[[Result], float], Callable[[Sequence[Result]], str]]] = {
    "final EM": (lambda r: r.final_em, COLUMNS["final EM"]),
    "sampled EM": (lambda r: r.sampled_em, COLUMNS["sampled EM"]),
    "steps": (lambda r: -(steps_to(r.curve) or math.inf), steps_cell),
}
"""What the mask is judged by: how good a run is (larger is better), and how a cell shows it."""


def markdown(results: Mapping[str, Sequence[Result]]) -> str:
    """One row a variant, in the order given; variants without a finished run say so."""
    lines = ["| variant | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, found in results.items():
        cells = [cell(found) for cell in COLUMNS.values()] if found else [MISSING] * len(COLUMNS)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    verdicts = [mask_verdict(results, *pair) for pair in MASK_PAIRS]
    return "\n".join([*lines, "", *filter(None, verdicts)]) + "\n"


def mask_verdict(results: Mapping[str, Sequence[Result]], masked: str, unmasked: str) -> str:
    """In what training on documents is clearly worse: every seed than every seed with the mask."""
    with_mask, without = results.get(masked), results.get(unmasked)
    if not with_mask or not without:
        return ""
    findings: dict[bool, list[str]] = {True: [], False: []}
    for name, (goodness, shown) in MEASURES.items():
        is_worse = max(map(goodness, without)) < min(map(goodness, with_mask))
        findings[is_worse].append(f"{name} ({shown(without)} against {shown(with_mask)})")
    worse, other = (", ".join(findings[key]) for key in (True, False))
    said = [f"clearly worse than `{masked}` in {worse}"] if worse else []
    said += [f"**not** clearly worse in {other}"] if other else []
    return f"- `{unmasked}` is {', and '.join(said)}."
