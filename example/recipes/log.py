"""The log and curve of a run of a recipe: `python -m example.recipes.log RUN NAME`.

Of `metrics.jsonl` it keeps the columns below, in `example/recipes/runs/NAME.csv`, and draws them.
"""

import argparse
import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RUNS = Path(__file__).parent / "runs"
COLUMNS = {
    "step": "step",
    "sampled_score": "critic/score/mean",
    "sampled_searches": "env/valid_searches",
    "em": "val/em",
    "searches": "val/env/valid_searches",
    "seconds": "timing_s/step",
}
"""Column of the log -> metric; em and searches are of held-out questions."""
Log = list[dict[str, float | None]]


def read_run(folder: Path) -> Log:
    """Return the columns of each step; None where a step has no such metric."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: row.get(key) for name, key in COLUMNS.items()} for row in rows]


def write_log(log: Log, path: Path) -> None:
    """Write a log as CSV, with four decimals."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in log:
            writer.writerow("" if value is None else round(value, 4) for value in row.values())


def read_log(path: Path) -> Log:
    """Return what `write_log` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(cell) if cell else None for name, cell in row.items()} for row in rows]


def draw(log: Log, path: Path) -> None:
    """Draw scores and searches by step."""
    figure, both = plt.subplots(1, 2, figsize=(8, 2.8))
    for axes, title, sampled, held_out in zip(
        both, ("exact match", "searches per question"),
        ("sampled_score", "sampled_searches"), ("em", "searches"), strict=True,
    ):  # fmt: skip
        for name, style in ((sampled, {"color": "0.6"}), (held_out, {"marker": "o"})):
            points = [(row["step"], row[name]) for row in log if row[name] is not None]
            label = "training, sampled" if name == sampled else "held out, greedy"
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
    both[0].set_ylim(-0.03, 1.03)
    both[1].set_ylim(-0.05, max(1.05, both[1].get_ylim()[1]))
    both[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    """Write log and curve of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="its trainer.default_local_dir")
    parser.add_argument("name", help="name of the recipe")
    options = parser.parse_args()
    RUNS.mkdir(exist_ok=True)
    log = read_run(options.run)
    write_log(log, RUNS / f"{options.name}.csv")
    draw(log, RUNS / f"{options.name}.png")


if __name__ == "__main__":
    main()
