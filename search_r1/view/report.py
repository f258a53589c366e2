"""A run's report: what it learned, with examples, what it cost, and what to try next.

`report.html` is the page of `search-r1 view` with the report in front; `report.md` says the same in
text. Both stand beside the files of the run that they are made of.
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
"""What is shown of a run that has it."""
FACTS = {"model": "actor_rollout_ref.model.path", "algorithm": "algorithm.adv_estimator",
         "seed": "trainer.seed", "learned from": "data.rollouts"}  # fmt: skip
MOST_EXAMPLES = 3
NUM_RESAMPLES = 1000
MEASURES = {"EM": "is_given", "answer in documents": "is_found", "searches": "searches"}
"""Columns of the index that are compared, by their titles."""


@dataclass(frozen=True)
class Example:
    """One question of the validation, before and after."""

    question: str
    accepted: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any]
    """Trajectories without their tokens."""


@dataclass(frozen=True)
class Report:
    """What is said of a run; all of it text, but for the examples."""

    title: str
    facts: list[tuple[str, str]]
    curves: list[str]
    heads: list[str]
    rows: list[list[str]]
    """The table of validations; empty where there were none."""
    examples: list[Example]
    cost: list[tuple[str, str]]
    advice: list[str]
    alarms: int


def report(run: Run) -> Report:
    known, heads, rows = set(run.metrics.names()), *table(run)
    return Report(
        title=run.name,
        facts=[
            *(
                (title, str(option(run, key)))
                for title, key in FACTS.items()
                if option(run, key) is not None
            ),
            ("steps", str(max(run.metrics.rows, default=0))),
        ],
        curves=[name for name in CURVES if name in known],
        heads=heads,
        rows=rows,
        examples=examples(run),
        cost=list(cost(run)),
        advice=list(advice(run)),
        alarms=len(alarms(run.metrics, run.config)),
    )


def option(run: Run, key: str) -> Any:
    """An option of the run by its dotted name, or None."""
    found: Any = run.config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def cost(run: Run) -> Iterator[tuple[str, str]]:
    """Time, tokens and searches of training."""
    steps = [row for step, row in run.metrics.rows.items() if step > 0]
    seconds = total(steps, "timing_s/step")
    yield "time in steps", f"{seconds / 3600:.2f} h ({seconds / max(1, len(steps)):.1f} s a step)"
    trainer = option(run, "trainer") or {}
    if any(name.startswith("perf/device_memory_gb") for name in run.metrics.names()):
        per_node = trainer.get("n_gpus_per_node", 0) + trainer.get("rollout_gpus", 0)
        nodes, critic = trainer.get("nnodes", 1), option(run, "critic") or {}
        of_critic = critic.get("n_gpus_per_node") or 0
        devices = per_node * nodes + of_critic * (critic.get("nnodes") or nodes)
        yield "GPU-hours", f"{devices * seconds / 3600:.2f} on {devices} GPUs"
    of_step = (option(run, "data.train_batch_size") or 0) * (
        option(run, "actor_rollout_ref.rollout.n_agent") or 0
    )
    yield "tokens learned from", f"{total(steps, 'perf/total_num_tokens'):,.0f}"
    yield "tokens sampled", f"{of_step * total(steps, 'response_length/mean'):,.0f}"
    yield "searches", f"{of_step * total(steps, 'env/valid_searches'):,.0f}"
    for title, name, form in (
        ("tokens/s for a GPU", "perf/tokens_per_second_per_gpu", "{:,.0f}"),
        ("MFU of the policy's update", "perf/mfu/actor", "{:.1%}"),
        ("share of the time: sampling", "timing_s/gen", "{:.0%}"),
        ("share of the time: the policy's update", "timing_s/update_actor", "{:.0%}"),
    ):
        values = [value for row in steps if (value := row.get(name)) is not None]
        if values:
            share = total(steps, name) / max(seconds, 1e-9)
            yield title, form.format(share if "timing" in name else np.mean(values))


def total(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def validations(run: Run) -> list[int]:
    """The steps of the first and the last validation; one where there was one only."""
    return sorted(run.index.kept(
        "SELECT DISTINCT step FROM trajectories WHERE kind = ?", (VALIDATION,)
    ))  # fmt: skip


def table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Each set's questions, and every measure before, after, and its change, with intervals."""
    steps = validations(run)
    if not steps:
        return [], []
    columns = ", ".join(MEASURES.values())
    query = f"SELECT uid, source, {columns} FROM trajectories WHERE kind = ? AND step = ?"
    found = [
        {row["uid"]: row for row in run.index.db.execute(query, (VALIDATION, step))}
        for step in steps
    ]
    after = found[-1]
    sources = sorted({row["source"] for row in after.values()})
    heads = ["set", "questions", "measure", *(f"step {step}" for step in steps)]
    heads += ["change"] if len(found) > 1 else []
    rows = []
    for name in ["all", *sources] if len(sources) > 1 else sources:
        uids = [u for u, row in after.items() if name in ("all", row["source"])]
        uids = [uid for uid in uids if all(uid in one for one in found)]
        values = np.array(
            [[float(one[uid][c] or 0) for one in found for c in MEASURES.values()] for uid in uids]
        ).reshape(len(uids), -1)
        rows += list(_rows(name, values))
    return heads, rows


def _rows(name: str, values: np.ndarray[Any, Any]) -> Iterator[list[str]]:
    """A row for each measure; `values` (questions, validations × measures)."""
    count, num = len(values), len(MEASURES)
    if not count:
        return
    means = values.mean(0)
    drawn = resampled_sums(values, NUM_RESAMPLES, seed=0) / count
    for place, title in enumerate(MEASURES):
        at = slice(place, None, num)
        cells = [_cell(m, interval(d)) for m, d in zip(means[at], drawn[:, at].T, strict=True)]
        if len(cells) > 1:
            changes = drawn[:, at][:, -1] - drawn[:, at][:, 0]
            cells.append(_cell(means[at][-1] - means[at][0], interval(changes), "+"))
        yield [name, str(count), title, *cells]


def _cell(value: float, found: Interval | None, sign: str = "") -> str:
    bounds = "" if found is None else f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
    return f"{value:{sign}.3f}{bounds}"


def examples(run: Run) -> list[Example]:
    """Questions that were learned, else some, of the validations; at even distances."""
    steps = validations(run)
    if not steps:
        return []
    query = (
        "SELECT b.line AS before, a.line AS after FROM trajectories a JOIN trajectories b "
        "USING (kind, uid) WHERE kind = ? AND a.step = ? AND b.step = ? {} ORDER BY a.line"
    )
    asked = (VALIDATION, steps[-1], steps[0])
    for learned in ("AND a.score > b.score", ""):
        pairs = run.index.db.execute(query.format(learned), asked).fetchall()
        if pairs:
            break
    count = min(MOST_EXAMPLES, len(pairs))
    chosen = [pairs[i * len(pairs) // count] for i in range(count)]
    found = []
    for one in chosen:
        after = run.trajectory(VALIDATION, steps[-1], one["after"], is_brief=True)
        before = run.trajectory(VALIDATION, steps[0], one["before"], is_brief=True)
        if after is not None:
            was = before if len(steps) > 1 else None
            found.append(Example(after["question"], after["gold"], was, after))
    return found


logger = logging.getLogger(__name__)

MOST_TRAJECTORIES = 60
"""Those that the file has beside the examples."""
HIDDEN = re.compile(rf"{CONTROLS.pattern}|[\u200b-\u200d\u2060-\u2065]")
"""Characters that act instead of being seen, or that nobody sees."""
INTERVALS = "Answers of the validation; in brackets 95 % intervals, by resampling questions"


def write_report(folder: Path) -> bool:
    """Write `report.html` and `report.md` beside `metrics.jsonl`; whether it did.

    A run never fails by it: what is wrong is logged.
    """
    try:
        with tempfile.TemporaryDirectory() as index:
            run = Run(folder, Path(index), only=_ends)
            run.refresh()
            if not run.metrics.rows:
                logger.warning("no report.html of %s: it has no metrics yet", folder)
                return False
            made = report(run)
            write_export([run], folder / "report.html", MOST_TRAJECTORIES, [asdict(made)])
            with atomic_write(folder / "report.md") as part:
                part.write_text(as_markdown(made), encoding="utf-8", errors="replace")
    except (OSError, UserError, sqlite3.Error) as error:
        logger.warning("no report.html of %s: %s", folder, error)
        return False
    except Exception:
        logger.exception("no report.html of %s: an error of the report's own", folder)
        return False
    logger.info("report: %s (and report.md)", folder / "report.html")
    return True


def _ends(steps: Collection[int]) -> set[int]:
    """The first and the last of a kind's steps."""
    return {min(steps), max(steps)} if steps else set()


def as_markdown(made: Report) -> str:
    """The report as text; words of a trajectory stand in indented code, where nothing acts."""
    parts = [f"# {_inline(made.title)}", *(f"- {k}: {_inline(v)}" for k, v in made.facts), ""]
    parts += ["## Evaluation", ""]
    if made.rows:
        parts += [*_lines(made.heads, made.rows), "", f"{INTERVALS}.", ""]
    else:
        parts += ["There was no validation (`trainer.test_freq`); `search-r1 evaluate` measures "
                  "the model.", ""]  # fmt: skip
    parts += ["## What to try next", "", *(f"- {line}" for line in made.advice), ""]
    parts += ["## Cost", "", *_lines(["", ""], made.cost), ""]
    if made.examples:
        parts += ["## Before and after", ""]
    for one in made.examples:
        parts += [_code(f"{one.question}\naccepted: {one.accepted}"), ""]
        for when, row in (("before", one.before), ("after", one.after)):
            if row is not None:
                said = (s["text"] for s in row["segments"] if s["origin"] != "prompt")
                parts += [f"{when}, score {row['score']}:", "", _code("".join(said).strip()), ""]
    return "\n".join([*parts, "Curves, all options and trajectories: `report.html`.", ""])


def _code(text: str) -> str:
    """A block that no text ends."""
    return "\n".join(f"    {_seen(line)}" for line in text.splitlines() or [""])


def _inline(text: str) -> str:
    """A text within a line of Markdown."""
    plain = html.escape(_seen(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*_\[\]|!])", r"\\\1", plain)


def _seen(text: str) -> str:
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_inline(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*heads], ["---"] * len(heads), *cells)]
