"""Writes the demo's report: summary.json, a learning curve, a table and sample dialogues."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from rich.console import Console
from rich.markdown import Markdown

from scripts import demo_texts as texts

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, Any]
Say = Callable[[str], str]
KINDS = {
    "geo_single": "one search needed",
    "geo_two_hop": "two searches needed",
    "geo_three_hop": "three searches needed",
    "geo_no_search": "no search needed",
    "geo_unanswerable": "no document answers",
    "geo_namesake": "two places with nearly the same name",
    "geo_outdated": "two documents that contradict each other",
}
"""What the data sources of the demo's worlds are."""


def read_jsonl(path: Path) -> list[Row]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, for the steps that have it."""
    logged = [row for row in rows if key in row]
    return [int(row["step"]) for row in logged], [float(row[key]) for row in logged]


def mean(rows: Sequence[Row], key: str) -> float:
    """Return the mean of a metric over the steps that have it."""
    return round(fmean(series(rows, key)[1]), 3)


def kinds(rows: Sequence[Row]) -> list[str]:
    """Return the data sources of the held-out questions."""
    found = (re.fullmatch("val/([^/]+)/em", key) for row in rows for key in row)
    return list(dict.fromkeys(match[1] for match in found if match))


def by_kind(rows: Sequence[Row], kind: str) -> dict[str, list[float]]:
    """Return EM and searches per question of a kind, before and after training."""
    columns = {"em": f"val/{kind}/em", "searches": f"val/{kind}/env/valid_searches"}
    values = {name: series(rows, key)[1] for name, key in columns.items()}
    return {name: [round(found[0], 4), round(found[-1], 4)] for name, found in values.items()}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot held-out EM (greedy decoding), training score and searches by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(*series(rows, "critic/score/mean"), color="0.6", label="training score (sampled)")
    left.plot(*series(rows, "val/em"), marker="o", label="held-out EM (greedy)")
    for kind in kinds(rows):
        label = f"… {KINDS.get(kind, kind)}"
        left.plot(*series(rows, f"val/{kind}/em"), marker="o", label=label)
    left.set(xlabel="step", ylabel="exact match", ylim=(-0.03, 1.03), title="learning to search")
    right.plot(*series(rows, "env/valid_searches"), color="0.6", label="training (sampled)")
    right.plot(*series(rows, "val/env/valid_searches"), marker="o", label="held out (greedy)")
    right.set(xlabel="step", ylabel="searches per question", title="searching")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def summarise(
    out: Path, algorithm: str, seed: int, seconds: Mapping[str, float], wall_s: float
) -> Row:
    """Return the content of `summary.json`."""
    rows = read_jsonl(out / "metrics.jsonl")
    _, em = series(rows, "val/em")
    empty = read_jsonl(out / "empty" / "metrics.jsonl")
    last = [row for row in rows if "val/em" in row][-1]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "steps": max(int(row["step"]) for row in rows),
        "val_em_first": round(em[0], 4),
        "val_em_last": round(em[-1], 4),
        "val_em_last_single": last["val/geo_single/em"],
        "val_em_last_two_hop": last["val/geo_two_hop/em"],
        "val_em_empty_retriever": series(empty, "val/em")[1][-1],
        "val_valid_search_last": last["val/env/valid_searches"],
        "kinds": {kind: by_kind(rows, kind) for kind in kinds(rows)},
        "val_rows": int(last["val/num_rows"]),
        "trainer_busy_share": mean(rows, "perf/trainer_busy_share"),
        "engine_busy_share": mean(rows, "perf/engine_busy_share"),
        "staleness": mean(rows, "rollout/staleness/mean"),
        "wall_s": round(wall_s, 1),
        "phases_s": {name: round(value, 1) for name, value in seconds.items()},
    }


def dialogues(out: Path, last_step: int, say: Say, count: int = 3) -> str:
    """Return dialogues on the same held-out questions before and after training, as Markdown."""
    before = read_jsonl(out / "validation" / "step_0.jsonl")
    after = read_jsonl(out / "validation" / f"step_{last_step}.jsonl")
    pairs = list(zip(before, after, strict=True))
    improved = [pair for pair in pairs if pair[0]["score"] < pair[1]["score"]] or pairs
    chosen = [improved[i * len(improved) // count] for i in range(count)]
    parts = []
    for old, new in chosen:
        parts.append(f"**{new['question']}** ({say('gold')}: {', '.join(new['ground_truth'])})\n")
        for name, row in (("before", old), ("after", new)):
            shown = f"```\n{row['dialogue'].strip()}\n```"
            parts.append(f"{say(name)}, EM {row['score']:.0f}:\n\n{shown}\n")
    return "\n".join(parts)


def busy(summary: Row) -> str:
    """Return how the time of a step was shared between trainer and engine."""
    return f"""
Per step, the trainer was busy for {summary["trainer_busy_share"]:.2f} and idle for
{1 - summary["trainer_busy_share"]:.2f} of the time, the engine busy for
{summary["engine_busy_share"]:.2f} and idle for {1 - summary["engine_busy_share"]:.2f}; tokens were
{summary["staleness"]:.2f} weight versions old when they were trained on.
"""


def table_of_kinds(summary: Row) -> str:
    """Return a table of EM and searches by kind of question, before and after training."""
    line = "| {} | {:.3f} | {:.3f} | {:.2f} | {:.2f} |"
    rows = "\n".join(
        line.format(KINDS.get(kind, kind), *values["em"], *values["searches"])
        for kind, values in summary["kinds"].items()
    )
    return f"""
| kind of question | EM before | EM after | searches before | searches after |
| --- | --- | --- | --- | --- |
{rows}
"""


def render(summary: Row, out: Path, world: str) -> str:
    """Return the report as Markdown; in Chinese without the shares of a step's time."""
    say = partial(texts.say, world)
    scores = {
        "after the warm start": summary["val_em_first"],
        "after reinforcement learning": summary["val_em_last"],
        "… one search needed": summary["val_em_last_single"],
        "… two searches needed": summary["val_em_last_two_hop"],
        "… with an empty retriever": summary["val_em_empty_retriever"],
    }
    rows = "\n".join(f"| {say(name)} | {score:.3f} |" for name, score in scores.items())
    phases = "\n".join(f"| {name} | {value:.0f} s |" for name, value in summary["phases_s"].items())
    serve, ask = texts.ask_with(world, out)
    num_steps, picture = summary["steps"], say("exact match and searches per question, by step")
    searches, seconds = summary["val_valid_search_last"], summary["wall_s"]
    heading = f"{summary['algorithm'].upper()}, {num_steps} {say('steps')}, {say('seed')}"
    saved = f"`{out}/global_step_{num_steps}`"
    return f"""# {heading} {summary["seed"]}

![{picture}](learning_curve.png)

| {say("held-out questions")} ({summary["val_rows"]}, {say("greedy")}) | {say("exact match")} |
| --- | --- |
{rows}

{say("Searches per question")}: {searches:.2f}; {say("wall time")}: {seconds:.0f} s.
{table_of_kinds(summary) if world == "hard" else ""}{busy(summary) if world != "zh" else ""}
| {say("phase")} | {say("time")} |
| --- | --- |
{phases}

## {say("The same held-out questions, before and after")}

{dialogues(out, num_steps, say)}

- {say("Learning curve")}: `{out / "learning_curve.png"}`
- {say("Learning curve in a browser")}: `search-r1 view {out}`
- {say("Model")}: `{out / "model"}`
- {say("Checkpoint to resume from")}: {saved}

{say("Ask it (start the retriever first, in another terminal)")}:

    {serve}
    {ask}
"""


def write_report(
    out: Path, algorithm: str, seed: int, seconds: Mapping[str, float], wall_s: float,
    console: Console, world: str = "en",
) -> None:  # fmt: skip
    """Write summary.json, learning_curve.png and report.md, and print the report."""
    summary = summarise(out, algorithm, seed, seconds, wall_s)
    plot(read_jsonl(out / "metrics.jsonl"), out / "learning_curve.png")
    text = render(summary, out, world)
    (out / "report.md").write_text(text, encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.rule(f"[bold]{texts.say(world, 'report')}")
    console.print(Markdown(text))
