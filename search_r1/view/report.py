"""A run's report: curves, validations, examples, cost, and suggestions.

`report.html` is the page of `search-r1 view` with the report in front; `report.md` is the report as
text. Both are written into the run's folder.
"""

import html
import logging
import re
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.evaluation.summary import Interval, interval, resampled_sums
from search_r1.plain import CONTROLS
from search_r1.view.advice import advice, alarms
from search_r1.view.export import write_export
from search_r1.view.index import VALIDATION
from search_r1.view.run import Run
from verl.errors import UserError
from verl.files import atomic_write

CURVES = ("val/em", "val/score", "critic/score/mean", "val/env/valid_searches",
          "env/valid_searches", "response_length/mean", "actor/entropy", "actor/grad_norm",
          "actor/pg_loss", "critic/kl", "actor/rollout_mismatch", "timing_s/step",
          "perf/tokens_per_second_per_gpu", "perf/mfu/actor")  # fmt: skip
"""Metrics whose curves are shown, if the run has them."""
FACTS = {"model": "actor_rollout_ref.model.path", "algorithm": "algorithm.adv_estimator",
         "seed": "trainer.seed", "learned from": "data.rollouts"}  # fmt: skip
"""Options that are shown, by their titles."""
MAX_EXAMPLES = 3
NUM_RESAMPLES = 1000
MEASURES = {"EM": "is_given", "answer in documents": "is_found", "searches": "searches"}
"""Columns of the index that are compared over the validations, by their titles."""


@dataclass(frozen=True)
class Example:
    """One question of the validation, before and after training."""

    question: str
    accepted: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any]
    """Trajectories without their tokens; `before` is None if there was one validation only."""


@dataclass(frozen=True)
class Report:
    """The contents of a report: text, except the examples."""

    title: str
    facts: list[tuple[str, str]]
    curves: list[str]
    heads: list[str]
    rows: list[list[str]]
    """Header and rows of the table of validations; empty if there were none."""
    examples: list[Example]
    cost: list[tuple[str, str]]
    advice: list[str]
    alarms: int


def report(run: Run) -> Report:
    heads, rows = table(run)
    names = set(run.metrics.names())
    options = {title: option(run, key) for title, key in FACTS.items()}
    return Report(
        title=run.name,
        facts=[
            *((title, str(value)) for title, value in options.items() if value is not None),
            ("steps", str(max(run.metrics.rows, default=0))),
        ],
        curves=[name for name in CURVES if name in names],
        heads=heads,
        rows=rows,
        examples=examples(run),
        cost=list(cost(run)),
        advice=list(advice(run)),
        alarms=len(alarms(run.metrics, run.config)),
    )


def option(run: Run, key: str) -> Any:
    """Return an option of the run by its dotted name, or None."""
    value: Any = run.config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def cost(run: Run) -> Iterator[tuple[str, str]]:
    """Yield time, tokens and searches of training, and shares of the time."""
    steps = [row for step, row in run.metrics.rows.items() if step > 0]
    seconds = _sum(steps, "timing_s/step")
    yield "time in steps", f"{seconds / 3600:.2f} h ({seconds / max(1, len(steps)):.1f} s a step)"
    trainer = option(run, "trainer") or {}
    if any(name.startswith("perf/device_memory_gb") for name in run.metrics.names()):
        per_node = trainer.get("n_gpus_per_node", 0) + trainer.get("rollout_gpus", 0)
        nodes = trainer.get("nnodes", 1)
        critic = option(run, "critic") or {}
        critic_per_node = critic.get("n_gpus_per_node") or 0
        devices = per_node * nodes + critic_per_node * (critic.get("nnodes") or nodes)
        yield "GPU-hours", f"{devices * seconds / 3600:.2f} on {devices} GPUs"
    num_prompts = option(run, "data.train_batch_size") or 0
    per_step = num_prompts * (option(run, "actor_rollout_ref.rollout.n_agent") or 0)
    yield "tokens learned from", f"{_sum(steps, 'perf/total_num_tokens'):,.0f}"
    yield "tokens sampled", f"{per_step * _sum(steps, 'response_length/mean'):,.0f}"
    yield "searches", f"{per_step * _sum(steps, 'env/valid_searches'):,.0f}"
    for title, name, form in (
        ("tokens/s per GPU", "perf/tokens_per_second_per_gpu", "{:,.0f}"),
        ("MFU of the policy's update", "perf/mfu/actor", "{:.1%}"),
        ("share of the time: sampling", "timing_s/gen", "{:.0%}"),
        ("share of the time: the policy's update", "timing_s/update_actor", "{:.0%}"),
    ):
        values = [value for row in steps if (value := row.get(name)) is not None]
        if values:
            share = _sum(steps, name) / max(seconds, 1e-9)
            yield title, form.format(share if "timing" in name else np.mean(values))


def _sum(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def validations(run: Run) -> list[int]:
    """Return the steps of the validations in the index."""
    query = "SELECT DISTINCT step FROM trajectories WHERE kind = ?"
    return sorted(run.index.column(query, (VALIDATION,)))


def table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: for each data set every measure at each validation, and its change.

    Only questions that every validation contains are compared.
    """
    steps = validations(run)
    if not steps:
        return [], []
    columns = ", ".join(MEASURES.values())
    query = f"SELECT uid, source, {columns} FROM trajectories WHERE kind = ? AND step = ?"
    by_step = [
        {row["uid"]: row for row in run.index.db.execute(query, (VALIDATION, step))}
        for step in steps
    ]
    after = by_step[-1]
    sources = sorted({row["source"] for row in after.values()})
    heads = ["set", "questions", "measure", *(f"step {step}" for step in steps)]
    heads += ["change"] if len(by_step) > 1 else []
    table_rows = []
    for name in ["all", *sources] if len(sources) > 1 else sources:
        uids = [u for u, row in after.items() if name in ("all", row["source"])]
        uids = [uid for uid in uids if all(uid in rows for rows in by_step)]
        values = np.array([
            [float(rows[uid][column] or 0) for rows in by_step for column in MEASURES.values()]
            for uid in uids
        ]).reshape(len(uids), -1)  # fmt: skip
        table_rows += list(_rows(name, values))
    return heads, table_rows


def _rows(name: str, values: np.ndarray[Any, Any]) -> Iterator[list[str]]:
    """Yield a table row for each measure; `values` is (questions, validations * measures)."""
    count = len(values)
    if not count:
        return
    all_means = values.mean(0)
    all_resampled = resampled_sums(values, NUM_RESAMPLES, seed=0) / count
    for number, title in enumerate(MEASURES):
        columns = slice(number, None, len(MEASURES))  # this measure at each validation
        means, resampled = all_means[columns], all_resampled[:, columns]
        cells = [_cell(m, interval(r)) for m, r in zip(means, resampled.T, strict=True)]
        if len(cells) > 1:
            changes = resampled[:, -1] - resampled[:, 0]
            cells.append(_cell(means[-1] - means[0], interval(changes), "+"))
        yield [name, str(count), title, *cells]


def _cell(value: float, bounds: Interval | None, sign: str = "") -> str:
    text = "" if bounds is None else f" [{bounds.low:{sign}.3f}, {bounds.high:{sign}.3f}]"
    return f"{value:{sign}.3f}{text}"


def examples(run: Run) -> list[Example]:
    """Return validation questions at even distances: those that were learned, or any if none."""
    steps = validations(run)
    if not steps:
        return []
    query = (
        "SELECT b.line AS before, a.line AS after FROM trajectories a JOIN trajectories b "
        "USING (kind, uid) WHERE kind = ? AND a.step = ? AND b.step = ? {} ORDER BY a.line"
    )
    values = (VALIDATION, steps[-1], steps[0])
    for condition in ("AND a.score > b.score", ""):
        pairs = run.index.db.execute(query.format(condition), values).fetchall()
        if pairs:
            break
    count = min(MAX_EXAMPLES, len(pairs))
    chosen = [pairs[i * len(pairs) // count] for i in range(count)]
    found = []
    for pair in chosen:
        after = run.trajectory(VALIDATION, steps[-1], pair["after"], is_brief=True)
        before = None
        if len(steps) > 1:
            before = run.trajectory(VALIDATION, steps[0], pair["before"], is_brief=True)
        if after is not None:
            found.append(Example(after["question"], after["gold"], before, after))
    return found


logger = logging.getLogger(__name__)

MAX_TRAJECTORIES = 60
"""Trajectories in `report.html`, in addition to the examples."""
HIDDEN = re.compile(rf"{CONTROLS.pattern}|[\u200b-\u200d\u2060-\u2065]")
"""Control characters and invisible ones."""
INTERVALS = "Answers of the validation; in brackets: 95 % intervals from resampling the questions"


def write_report(folder: Path) -> bool:
    """Write `report.html` and `report.md` into a run's folder; return whether that succeeded.

    Problems are logged and never raised, so that a run cannot fail because of its report; a bug is
    logged with its traceback.
    """
    try:
        with tempfile.TemporaryDirectory() as index:
            run = Run(folder, Path(index), select_steps=_first_and_last)
            run.refresh()
            if not run.metrics.rows:
                logger.warning("no report.html for %s: it has no metrics yet", folder)
                return False
            contents = report(run)
            write_export([run], folder / "report.html", MAX_TRAJECTORIES, [asdict(contents)])
            with atomic_write(folder / "report.md") as part:
                part.write_text(as_markdown(contents), encoding="utf-8", errors="replace")
    except (OSError, UserError, sqlite3.Error) as error:
        logger.warning("no report.html for %s: %s", folder, error)
        return False
    except Exception:  # a bug of the report must not make a finished run a failed one
        logger.exception("no report.html for %s: unexpected error in the report", folder)
        return False
    logger.info("report: %s (and report.md)", folder / "report.html")
    return True


def _first_and_last(steps: Collection[int]) -> set[int]:
    return {min(steps), max(steps)} if steps else set()


def as_markdown(contents: Report) -> str:
    """Return the report as Markdown; texts of trajectories are indented code, so that none acts."""
    facts = (f"- {name}: {_escape_markdown(value)}" for name, value in contents.facts)
    parts = [f"# {_escape_markdown(contents.title)}", *facts, "", "## Evaluation", ""]
    if contents.rows:
        parts += [*_table_lines(contents.heads, contents.rows), "", f"{INTERVALS}.", ""]
    else:
        parts += ["There was no validation (`trainer.test_freq`); `search-r1 evaluate` measures "
                  "the model.", ""]  # fmt: skip
    parts += ["## What to try next", "", *(f"- {line}" for line in contents.advice), ""]
    parts += ["## Cost", "", *_table_lines(["", ""], contents.cost), ""]
    if contents.examples:
        parts += ["## Before and after", ""]
    for example in contents.examples:
        parts += [_code_block(f"{example.question}\naccepted: {example.accepted}"), ""]
        for when, row in (("before", example.before), ("after", example.after)):
            if row is not None:
                texts = (s["text"] for s in row["segments"] if s["origin"] != "prompt")
                text = "".join(texts).strip()
                parts += [f"{when}, score {row['score']}:", "", _code_block(text), ""]
    return "\n".join([*parts, "Curves, all options and trajectories: `report.html`.", ""])


def _code_block(text: str) -> str:
    """Return an indented code block, which no text can end."""
    return "\n".join(f"    {_escape_hidden(line)}" for line in text.splitlines() or [""])


def _escape_markdown(text: str) -> str:
    """Escape a text for use within a line of Markdown."""
    plain = html.escape(_escape_hidden(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*_\[\]|!])", r"\\\1", plain)


def _escape_hidden(text: str) -> str:
    return HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_escape_markdown(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*heads], ["---"] * len(heads), *cells)]
