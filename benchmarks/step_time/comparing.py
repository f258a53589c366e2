"""Compares measured steps with predictions from rates that were fitted to other configurations.

Each step is predicted twice: from the token counts of its sampled dialogues, and from the
description of the configuration alone. Both know only two quantiles of the search times. A step of
a few dozen dialogues varies with the random draws. This variation is part of the second error, and
is also reported separately.
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
"""Start of the fit: twice, half and 2.5 times the paced engine's real values."""
DRAWS = 4
"""Random draws, of search times or of whole batches, over which a prediction is averaged."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FittedRates:
    """Results of the calibration."""

    engine: EngineRates
    train_tokens_s: float
    wrapper_letters: float
    """Mean number of characters that an observation adds around its document."""


def recorded_dialogues(row: Mapping[str, Any]) -> list[Dialogue]:
    """Return the dialogues of a measured step, without search times."""
    return [
        Dialogue(prompt, tuple(Turn(*turn) for turn in turns)) for prompt, turns in row["dialogues"]
    ]


def add_drawn_search_times(case: Case, dialogues: Sequence[Dialogue], seed: int) -> Batch:
    """Return a batch of `dialogues` with search times drawn from the case's distribution."""
    times = LogNormal(case.search_p50, case.search_p99)
    return Batch(tuple(add_search_times(dialogues, times, np.random.default_rng(seed))), case.group)


def fit(cases: Sequence[Case], rows: Rows) -> FittedRates:
    """Fit the rates to measured configurations."""
    observations, wrapper_letters, num_tokens = [], [], 0
    for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
        batch = add_drawn_search_times(case, recorded_dialogues(row), number)
        observations.append(Observation(batch, case.engines, case.slots, row["rollout_s"]))
        num_tokens += sum(batch.lengths)
        for dialogue in batch.dialogues:
            wrapper_letters += [
                turn.observation_tokens - case.letters
                for turn in dialogue.turns
                if turn.observation_tokens
            ]
    seconds = sum(row["train_s"] for row in rows)
    engine = fit_engine(observations, GUESS)
    return FittedRates(engine, num_tokens / seconds, fmean(wrapper_letters))


def predict(case: Case, batches: Sequence[Batch], rates: FittedRates) -> list[tuple[float, float]]:
    """Predict the seconds of rollout and of training for each batch."""
    seconds = []
    for batch in batches:
        rollout = simulate_rollout(rates.engine, Observation(batch, case.engines, case.slots, 0.0))
        seconds.append((rollout, sum(batch.lengths) / rates.train_tokens_s))
    return seconds


def report(cases: Sequence[Case], rows: Rows, calibrate: int) -> str:
    """Return a table of the predicted configurations, followed by the errors over all of them.

    The rates are fitted to the first `calibrate` configurations, which are not in the table.
    """
    fitted = fit(cases[:calibrate], rows[:calibrate])
    engine = fitted.engine
    lines = [
        f"fitted to {calibrate}: step {1e3 * engine.step_s:.1f} ms + {1e3 * engine.sequence_s:.2f} "
        f"ms per request, {engine.prefill_tokens_s:,.0f} prompt tokens/s, "
        f"{fitted.train_tokens_s:,.0f} tokens/s trained",
        "",
        "| prompts x group | engines | slots | turns | searches | search p50, p99 | turn "
        "| document | prompt | rollout s | predicted | step s | predicted | error |",
        "|" + " --- |" * 14,
    ]
    names = ("rollout", "rollout, from the description alone", "training", "step")
    errors: dict[str, list[float]] = {name: [] for name in names}
    spreads = []
    for case, row in zip(cases[calibrate:], rows[calibrate:], strict=True):
        dialogues, workload = recorded_dialogues(row), case.workload(fitted.wrapper_letters)
        sampled = [add_drawn_search_times(case, dialogues, seed) for seed in range(DRAWS)]
        drawn = [workload.draw(seed) for seed in range(DRAWS)]
        from_dialogues = predict(case, sampled, fitted)
        rollout = fmean(seconds for seconds, _ in from_dialogues)
        training = from_dialogues[0][1]
        from_description = [seconds for seconds, _ in predict(case, drawn, fitted)]
        mean = fmean(from_description)
        spreads.append(fmean(abs(seconds / mean - 1) for seconds in from_description))
        step, measured = rollout + training, row["rollout_s"] + row["train_s"]
        ratios = (rollout / row["rollout_s"], mean / row["rollout_s"],
                  training / row["train_s"], step / measured)  # fmt: skip
        for name, ratio in zip(names, ratios, strict=True):
            errors[name].append(ratio - 1)
        lines.append(
            f"| {case.prompts} x {case.group} | {case.engines} | {case.slots} | {case.max_turns} "
            f"| {case.search_share} | {case.search_p50}, {case.search_p99} | {case.words_p50:.0f} "
            f"| {case.letters} | {case.prompt} | {row['rollout_s']:.1f} | {rollout:.1f} "
            f"| {measured:.1f} | {step:.1f} | {step / measured - 1:+.1%} |"
        )
    lines += ["", *(error_line(name, values) for name, values in errors.items())]
    lines.append(f"rollouts of one description differ from their mean by {median(spreads):.1%}")
    return "\n".join(lines)


def error_line(name: str, errors: Sequence[float]) -> str:
    """Summarize the relative errors of one predicted quantity."""
    sizes = sorted(abs(error) for error in errors)
    return (
        f"{name}: {len(sizes)} configurations, median error {median(sizes):.1%}, 90 % within "
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, largest {sizes[-1]:.1%}, mean of signed "
        f"errors {fmean(errors):+.1%}"
    )
