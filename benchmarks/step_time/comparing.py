"""Measured steps against those that the model foresees with rates fitted to other configurations.

Two predictions of each: from the token counts of the dialogues that were played, and from the
description of the configuration alone. Of searches both know no more than two quantiles. A step of
some dozen dialogues varies with its draw: that is in the second error, and is measured beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.step_time.cases import Case
from search_r1.plan.planning import Observation, fit_engine, simulate_rollout
from search_r1.plan.simulation import EngineRates
from search_r1.plan.workload import Batch, Dialogue, LogNormal, Turn, add_search_times

GUESS = EngineRates(step_s=0.03, sequence_s=0.0004, prefill_tokens_s=20_000, slots=1)
"""Where fitting begins: twice too slow, half, and 2.5 times too fast."""
DRAWS = 4
"""Draws, of search times or of whole batches, that a prediction is the mean of."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Fitted:
    """What is known after the calibration."""

    engine: EngineRates
    train_tokens_s: float
    wrapping: float
    """Letters that stand around a document."""


def recorded(row: Mapping[str, Any]) -> list[Dialogue]:
    """The dialogues of a measured step, without the times of their searches."""
    return [
        Dialogue(prompt, tuple(Turn(*turn) for turn in turns)) for prompt, turns in row["dialogues"]
    ]


def timed(case: Case, dialogues: Sequence[Dialogue], seed: int) -> Batch:
    """Those dialogues with times of searches as the case describes them."""
    waits = LogNormal(case.search_p50, case.search_p99)
    return Batch(tuple(add_search_times(dialogues, waits, np.random.default_rng(seed))), case.group)


def fit(cases: Sequence[Case], rows: Rows) -> Fitted:
    """Rates from measured configurations."""
    observed, extra, tokens = [], [], 0
    for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
        batch = timed(case, recorded(row), number)
        observed.append(Observation(batch, case.engines, case.slots, row["rollout_s"]))
        tokens += sum(batch.lengths)
        seen = [turn.observation_tokens for one in batch.dialogues for turn in one.turns]
        extra += [count - case.letters for count in seen if count]
    seconds = sum(row["train_s"] for row in rows)
    return Fitted(fit_engine(observed, GUESS), tokens / seconds, fmean(extra))


def foresee(case: Case, batches: Sequence[Batch], fitted: Fitted) -> list[tuple[float, float]]:
    """Seconds of rollout and of training of each batch."""
    found = []
    for batch in batches:
        rollout = simulate_rollout(fitted.engine, Observation(batch, case.engines, case.slots, 0.0))
        found.append((rollout, sum(batch.lengths) / fitted.train_tokens_s))
    return found


def report(cases: Sequence[Case], rows: Rows, calibrate: int) -> str:
    """A row for each configuration that was not fitted to, and the errors of all of them."""
    fitted = fit(cases[:calibrate], rows[:calibrate])
    engine = fitted.engine
    lines = [
        f"fitted to {calibrate}: step {1e3 * engine.step_s:.1f} ms + {1e3 * engine.sequence_s:.2f} "
        f"ms a request, {engine.prefill_tokens_s:,.0f} tokens/s read, "
        f"{fitted.train_tokens_s:,.0f} tokens/s trained",
        "",
        "| prompts x group | engines | slots | turns | searches | search p50, p99 | turn | found "
        "| prompt | rollout s | predicted | step s | predicted | error |",
        "|" + " --- |" * 14,
    ]
    names = ("rollout", "rollout, from the description alone", "training", "step")
    errors: dict[str, list[float]] = {name: [] for name in names}
    spreads = []
    for case, row in zip(cases[calibrate:], rows[calibrate:], strict=True):
        load, played = case.workload(fitted.wrapping), recorded(row)
        known = foresee(case, [timed(case, played, seed) for seed in range(DRAWS)], fitted)
        drawn = foresee(case, [load.draw(seed) for seed in range(DRAWS)], fitted)
        rollout, training = fmean(one for one, _ in known), known[0][1]
        alone = [one for one, _ in drawn]
        step, real = rollout + training, row["rollout_s"] + row["train_s"]
        spreads.append(fmean(abs(one / fmean(alone) - 1) for one in alone))
        found = (rollout / row["rollout_s"], fmean(alone) / row["rollout_s"],
                 training / row["train_s"], step / real)  # fmt: skip
        for name, ratio in zip(names, found, strict=True):
            errors[name].append(ratio - 1)
        lines.append(
            f"| {case.prompts} x {case.group} | {case.engines} | {case.slots} | {case.max_turns} "
            f"| {case.search_share} | {case.search_p50}, {case.search_p99} | {case.words_p50:.0f} "
            f"| {case.letters} | {case.prompt} | {row['rollout_s']:.1f} | {rollout:.1f} "
            f"| {real:.1f} | {step:.1f} | {step / real - 1:+.1%} |"
        )
    lines.append("")
    for name, ratios in errors.items():
        sizes = sorted(abs(error) for error in ratios)
        lines.append(
            f"{name}: {len(sizes)} configurations, median error {median(sizes):.1%}, 90 % within "
            f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, largest {sizes[-1]:.1%}, mean of signed "
            f"errors {fmean(ratios):+.1%}"
        )
    lines.append(f"rollouts of one description differ from their mean by {median(spreads):.1%}")
    return "\n".join(lines)
