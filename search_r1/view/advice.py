"""What a reader of a run's report should know: alarms of the guard, and what to try next.

`metrics.jsonl` contains the health of each step but not the reasons; they are found by applying
the guard's rules to the logged metrics again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.view.index import VALIDATION
from search_r1.view.run import MetricsLog, Run
from verl.config import GuardConfig
from verl.monitor.guard import CollapseGuard

HEALTH, ROLLBACKS = "guard/health", "guard/rollbacks"


@dataclass(frozen=True)
class Alarm:
    """A step at which the guard warned or found a collapse."""

    step: int
    health: str
    reasons: tuple[str, ...]
    """Empty if the rules find none now: the run used other rules, or another first step."""
    is_rollback: bool
    """Whether the run then went back to a healthy checkpoint."""


def alarms(log: MetricsLog, config: Mapping[str, Any]) -> list[Alarm]:
    """Return every alarm, in the order of the steps."""
    section = (config.get("trainer") or {}).get("guard") or {}
    known = {field.name for field in fields(GuardConfig)}
    options = GuardConfig(**{name: value for name, value in section.items() if name in known})
    guard = CollapseGuard(options, Path())
    raised: list[Alarm] = []
    rollbacks = 0.0
    for step, row in sorted(log.rows.items()):
        health = row.get(HEALTH)
        if health is None:
            continue
        if (row.get(ROLLBACKS) or 0.0) > rollbacks:
            rollbacks = row[ROLLBACKS] or 0.0
            guard.broken.clear()
            if raised:
                raised[-1] = replace(raised[-1], is_rollback=True)
        metrics = {name: float("nan") if v is None else v for name, v in row.items()}
        verdict = guard.observe(metrics)
        if health > 0:
            word = "collapsed" if health >= 2 else "warning"
            raised.append(Alarm(step, word, verdict.reasons, False))
    return raised


NUM_LAST_STEPS = 10
"""Steps at the end of a run over which a metric is averaged."""
LOW_SHARE, HIGH_SHARE = 0.1, 0.2
"""Shares below and above which a suggestion is made."""


def advice(run: Run) -> Iterator[str]:
    """Yield suggestions, the most urgent first, or a sentence that there are none."""
    hints = [*_health(run), *_learning(run), *_answers(run), *_time(run)]
    yield from hints or ["Nothing stands out: train longer, or try a larger model."]


def final_mean(run: Run, name: str) -> float:
    """Return the mean of a metric over the last steps, or NaN if the run does not have it."""
    values = [value for value in run.metrics.curve(name)[1] if value is not None][-NUM_LAST_STEPS:]
    return float(np.mean(values)) if values else math.nan


def _health(run: Run) -> Iterator[str]:
    """Yield hints about alarms, mismatching log-probs and failing tools."""
    raised = alarms(run.metrics, run.config)
    if raised:
        yield (f"The guard raised {len(raised)} alarms, the last at step {raised[-1].step}: lower "
               "actor.optim.lr, or trainer.guard.action=stop (docs/guides/guard.md).")  # fmt: skip
    if final_mean(run, "actor/rollout_mismatch") > 0.1:
        yield ("Engine and trainer disagree about log-probs (actor/rollout_mismatch above 0.1): "
               "set actor.rollout_is=token, or use the same dtype for both.")  # fmt: skip
    if final_mean(run, "rollout/failed") > 0.01:
        yield "Trajectories fail because of their tools: see docs/guides/long_runs.md."


def _learning(run: Run) -> Iterator[str]:
    """Yield hints about whether the policy learned, and whether it is still improving."""
    if final_mean(run, "env/valid_searches") < LOW_SHARE:
        yield ("The policy rarely searches: start from SFT on demonstrations (verl.sft), use "
               "another template, or reward retrieval (reward_model.retrieval_score).")  # fmt: skip
    if final_mean(run, "critic/score/mean") < 0.02:
        yield ("Almost nothing is rewarded, so there is little to learn from: use easier questions "
               "first, more samples per prompt (rollout.n_agent), or start from SFT.")  # fmt: skip
    name = "val/em" if "val/em" in run.metrics.names() else "val/score"
    steps, values = run.metrics.curve(name)
    scores = [value for value in values if value is not None]
    if len(scores) > 2:
        best = int(np.argmax(scores))
        if best == len(scores) - 1:
            yield (f"{name} was highest at the end, so the policy is still improving: continue "
                   "training (trainer.resume_mode).")  # fmt: skip
        elif scores[-1] < scores[best] - 0.02:
            yield (f"{name} was highest at step {steps[best]} ({scores[best]:.3f}, at the end "
                   f"{scores[-1]:.3f}): use that checkpoint (trainer.keep_best).")  # fmt: skip


def _answers(run: Run) -> Iterator[str]:
    """Yield hints about why trajectories end early or answers are wrong."""
    for name, option in (("rollout/out_of_turns", "max_turns"),
                         ("rollout/out_of_budget", "data.max_prompt_length"),
                         ("env/truncated_turns", "data.max_response_length")):  # fmt: skip
        if final_mean(run, name) > HIGH_SHARE:
            yield f"{final_mean(run, name):.0%} of trajectories end early ({name}): raise {option}."
    where = (
        "FROM trajectories WHERE kind = ? AND step = (SELECT max(step) FROM trajectories "
        "WHERE kind = ?) AND NOT is_given"
    )
    row = run.index.db.execute(f"SELECT count(*) AS wrong, sum(is_found) AS missed {where}",
                               (VALIDATION, VALIDATION)).fetchone()  # fmt: skip
    if row["wrong"] and row["missed"] > row["wrong"] / 2:
        yield (f"{row['missed']} of {row['wrong']} wrong answers were given although the documents "
               "contained an accepted one: try a larger model, a smaller retriever.topk, or a "
               "reranker.")  # fmt: skip
    elif row["wrong"]:
        yield (f"{row['wrong'] - row['missed']} of {row['wrong']} wrong answers were given without "
               "an accepted one in the documents: try a better retriever, a larger "
               "retriever.topk, or more turns.")  # fmt: skip


def _time(run: Run) -> Iterator[str]:
    """Yield a hint if sampling dominates the time of a step."""
    step, sampling = final_mean(run, "timing_s/step"), final_mean(run, "timing_s/gen")
    if step > 0 and sampling > 0.7 * step:
        yield (f"Sampling takes {sampling / step:.0%} of a step: try "
               "rollout.max_staleness (docs/guides/rollouts.md) or faster searches.")  # fmt: skip
