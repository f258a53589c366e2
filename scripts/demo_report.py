"""Writes the demo's report: summary.json, a learning curve, a table and sample dialogues."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from rich.console import Console
from rich.markdown import Markdown

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, Any]


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


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot held-out EM (greedy decoding), training score and searches by step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(*series(rows, "critic/score/mean"), color="0.6", label="training score (sampled)")
    for key, label in {
        "val/em": "held-out EM (greedy)",
        "val/geo_single/em": "… one search needed",
        "val/geo_two_hop/em": "… two searches needed",
    }.items():
        left.plot(*series(rows, key), marker="o", label=label)
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
        "val_rows": int(last["val/num_rows"]),
        "trainer_busy_share": mean(rows, "perf/trainer_busy_share"),
        "engine_busy_share": mean(rows, "perf/engine_busy_share"),
        "staleness": mean(rows, "rollout/staleness/mean"),
        "wall_s": round(wall_s, 1),
        "phases_s": {name: round(value, 1) for name, value in seconds.items()},
    }


def dialogues(out: Path, last_step: int, count: int = 3) -> str:
    """Return dialogues on the same held-out questions before and after training, as Markdown."""
    before = read_jsonl(out / "validation" / "step_0.jsonl")
    after = read_jsonl(out / "validation" / f"step_{last_step}.jsonl")
    pairs = list(zip(before, after, strict=True))
    improved = [pair for pair in pairs if pair[0]["score"] < pair[1]["score"]] or pairs
    chosen = [improved[i * len(improved) // count] for i in range(count)]
    parts = []
    for old, new in chosen:
        parts.append(f"**{new['question']}** (gold: {', '.join(new['ground_truth'])})\n")
        for name, row in (("before", old), ("after", new)):
            parts.append(f"{name}, EM {row['score']:.0f}:\n\n```\n{row['dialogue'].strip()}\n```\n")
    return "\n".join(parts)


def render(summary: Row, out: Path) -> str:
    """Return the report as Markdown."""
    phases = "\n".join(f"| {name} | {value:.0f} s |" for name, value in summary["phases_s"].items())
    return f"""# {summary["algorithm"].upper()}, {summary["steps"]} steps, seed {summary["seed"]}

![exact match and searches per question, by step](learning_curve.png)

| held-out questions ({summary["val_rows"]}, greedy) | exact match |
| --- | --- |
| after the warm start | {summary["val_em_first"]:.3f} |
| after reinforcement learning | {summary["val_em_last"]:.3f} |
| … one search needed | {summary["val_em_last_single"]:.3f} |
| … two searches needed | {summary["val_em_last_two_hop"]:.3f} |
| … with an empty retriever | {summary["val_em_empty_retriever"]:.3f} |

Searches per question: {summary["val_valid_search_last"]:.2f}. Wall time {summary["wall_s"]:.0f} s.

Per step, the trainer was busy for {summary["trainer_busy_share"]:.2f} and idle for
{1 - summary["trainer_busy_share"]:.2f} of the time, the engine busy for
{summary["engine_busy_share"]:.2f} and idle for {1 - summary["engine_busy_share"]:.2f}; tokens were
{summary["staleness"]:.2f} weight versions old when they were trained on.

| phase | time |
| --- | --- |
{phases}

## The same held-out questions, before and after

{dialogues(out, summary["steps"])}

Learning curve: `{out / "learning_curve.png"}`; `search-r1 view {out}` shows it in a browser.
Model: `{out / "model"}` (checkpoint to resume from: `{out}/global_step_{summary["steps"]}`)

Ask it (start the retriever first, `bash retrieval_launch.sh` in another terminal):

    .venv/bin/python infer.py "What is the calling code of Ghana?"
"""


def write_report(
    out: Path, algorithm: str, seed: int, seconds: Mapping[str, float], wall_s: float,
    console: Console,
) -> None:  # fmt: skip
    """Write summary.json, learning_curve.png and report.md, and print the report."""
    summary = summarise(out, algorithm, seed, seconds, wall_s)
    plot(read_jsonl(out / "metrics.jsonl"), out / "learning_curve.png")
    text = render(summary, out)
    (out / "report.md").write_text(text)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.rule("[bold]report")
    console.print(Markdown(text))
