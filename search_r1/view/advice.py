"""What stands out in a run: the guard's alarms with their reasons, and what to try next.

`metrics.jsonl` says how healthy each step was; the guard's rules, asked again over the same
numbers, say why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
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
    """A step that the guard had something to say about."""

    step: int
    health: str
    reasons: tuple[str, ...]
    """Empty where the rules, asked again, find none: they were others, or began elsewhere."""
    is_rollback: bool
    """The run went back to a healthy checkpoint after it."""


def alarms(log: MetricsLog, config: Mapping[str, Any]) -> list[Alarm]:
    """Every alarm, in the order of the steps."""
    given = (config.get("trainer") or {}).get("guard") or {}
    known = {field.name for field in fields(GuardConfig)}
    options = GuardConfig(**{name: value for name, value in given.items() if name in known})
    guard = CollapseGuard(options, Path())
    found: list[Alarm] = []
    rollbacks = 0.0
    for step, row in sorted(log.rows.items()):
        health = row.get(HEALTH)
        if health is None:
            continue
        if (row.get(ROLLBACKS) or 0.0) > rollbacks:
            rollbacks = row[ROLLBACKS] or 0.0
            guard.broken.clear()
            found[-1:] = [Alarm(a.step, a.health, a.reasons, True) for a in found[-1:]]
        numbers = {name: float("nan") if v is None else v for name, v in row.items()}
        verdict = guard.observe(numbers)
        if health > 0:
            word = "collapsed" if health >= 2 else "warning"
            found.append(Alarm(step, word, verdict.reasons, False))
    return found


LATEST = 10
"""Steps that stand for the end of a run."""
FEW, MANY = 0.1, 0.2
"""Shares that are few, and many."""


def advice(run: Run) -> Iterator[str]:
    """Sentences, the most pressing first; one that says so where nothing stands out."""
    found = [*_health(run), *_learning(run), *_answers(run), *_time(run)]
    yield from found or ["Nothing stands out: train longer, or try a larger model."]


def end_of(run: Run, name: str) -> float | None:
    """A metric's mean over the last steps."""
    values = [value for value in run.metrics.curve(name)[1] if value is not None][-LATEST:]
    return float(np.mean(values)) if values else None


def _is(run: Run, name: str, above: float | None = None, below: float | None = None) -> bool:
    value = end_of(run, name)
    if value is None:
        return False
    return (above is None or value > above) and (below is None or value < below)


def _health(run: Run) -> Iterator[str]:
    """What went wrong."""
    found = alarms(run.metrics, run.config)
    if found:
        last = found[-1]
        yield (f"The guard raised {len(found)} alarms, the last at step {last.step}: a lower "
               "actor.optim.lr, or trainer.guard.action=rollback (docs/guard.md).")  # fmt: skip
    if _is(run, "actor/rollout_mismatch", above=0.1):
        yield ("Engine and trainer disagree about log-probs (actor/rollout_mismatch above 0.1): "
               "actor.rollout_is=token, or the same dtype on both sides.")  # fmt: skip
    if _is(run, "rollout/failed", above=0.01):
        yield "Trajectories fail because of their tools: look at the retriever (docs/failures.md)."


def _learning(run: Run) -> Iterator[str]:
    """Whether it learned, and still does."""
    if _is(run, "env/valid_searches", below=FEW):
        yield ("The policy hardly searches: a warm start on demonstrations (verl.sft), another "
               "template, or a reward for finding (reward_model.retrieval_score).")  # fmt: skip
    if _is(run, "critic/score/mean", below=0.02):
        yield ("Almost nothing is rewarded, so there is little to learn from: easier questions "
               "first, more samples a prompt (rollout.n_agent), or a warm start.")  # fmt: skip
    name = "val/em" if "val/em" in run.metrics.names() else "val/score"
    steps, values = run.metrics.curve(name)
    scores = [value for value in values if value is not None]
    if len(scores) > 2:
        best = int(np.argmax(scores))
        if best == len(scores) - 1:
            yield f"{name} was highest at the end: it still learns; train on (trainer.resume_mode)."
        elif scores[-1] < scores[best] - 0.02:
            yield (f"{name} was highest at step {steps[best]} ({scores[best]:.3f}, at the end "
                   f"{scores[-1]:.3f}): take that checkpoint (trainer.keep_best).")  # fmt: skip


def _answers(run: Run) -> Iterator[str]:
    """What stands between the policy and right answers."""
    for name, option in (("rollout/out_of_turns", "max_turns"),
                         ("rollout/out_of_budget", "data.max_prompt_length"),
                         ("env/truncated_turns", "data.max_response_length")):  # fmt: skip
        if _is(run, name, above=MANY):
            yield f"{end_of(run, name):.0%} of trajectories end early ({name}): raise {option}."
    where = (
        "FROM trajectories WHERE kind = ? AND step = (SELECT max(step) FROM trajectories "
        "WHERE kind = ?) AND NOT is_given"
    )
    row = run.index.db.execute(f"SELECT count(*) AS wrong, sum(is_found) AS missed {where}",
                               (VALIDATION, VALIDATION)).fetchone()  # fmt: skip
    if row["wrong"] and row["missed"] > row["wrong"] / 2:
        yield (f"{row['missed']} of {row['wrong']} wrong answers stood in the documents: reading "
               "is lacking; a larger model, a smaller retriever.topk, a reranker.")  # fmt: skip
    elif row["wrong"]:
        lost = row["wrong"] - row["missed"]
        yield (f"{lost} of {row['wrong']} wrong answers were in no document that was found: a "
               "better retriever, a larger retriever.topk, more turns.")  # fmt: skip


def _time(run: Run) -> Iterator[str]:
    """Where the time went."""
    step, sampling = end_of(run, "timing_s/step"), end_of(run, "timing_s/gen")
    if step and sampling and sampling > 0.7 * step:
        yield (f"Sampling takes {sampling / step:.0%} of a step: search-r1 plan, "
               "rollout.max_staleness (docs/asynchrony.md), or a faster retriever.")  # fmt: skip
