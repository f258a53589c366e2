"""Scores of all arms by question, their table and picture: `python -m example.smollm2.arms CSV`.

The file has a line for each question and, for each arm, the columns `em_ARM`, `f1_ARM`,
`searches_ARM` and `shown_ARM` (an accepted answer stood in the documents). `--add ARM=EVALUATION`
adds the columns of a finished evaluation of the same questions; `--picture` draws EM with its
intervals. Intervals are percentiles of a bootstrap over questions, the same ones for every arm;
for two means of arms (`--mean`, such as the seeds of an objective) also over questions and arms.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from search_r1.evaluation.samples import Sample
from search_r1.evaluation.store import read_evaluation
from search_r1.evaluation.summary import NUM_RESAMPLES, interval, resampled_sums
from search_r1.plain import markdown_table
from verl.errors import DataError, explain

PREFIX = "em_"
MEASURES = ("em", "f1", "searches", "shown")


def columns_of(samples: Sequence[Sample], arm: str) -> pd.DataFrame:
    """Return an arm's columns, by the number of the row in the question file."""
    rows = [int(sample.uid.rpartition("#")[2]) for sample in samples]
    values = [(int(s.em), s.f1, len(s.searches), int(s.has_answer_in_documents)) for s in samples]
    names = [f"{measure}_{arm}" for measure in MEASURES]
    return pd.DataFrame(values, index=rows, columns=names)


def add(table: pd.DataFrame, arm: str, folder: Path) -> pd.DataFrame:
    """Add an arm. Raises DataError if its questions are others than the table's."""
    columns = columns_of(read_evaluation(folder)[1], arm)
    if sorted(columns.index) != sorted(table["row"]):
        got, expected = f"{len(columns)} rows", f"the {len(table)} rows of the file"
        raise DataError(explain(f"{arm} ({folder})", got, expected, "evaluate the same questions"))
    kept = table.drop(columns=[name for name in columns if name in table])
    return kept.merge(columns, left_on="row", right_index=True)


def means(table: pd.DataFrame, names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """Return mean, low and high end of the interval of each column, in percent."""
    values = 100 * table[list(names)].to_numpy(float)
    drawn = resampled_sums(values, NUM_RESAMPLES, seed=0) / len(values)
    found = {}
    for number, name in enumerate(names):
        spread = interval(drawn[:, number])
        assert spread is not None, "percentages are finite"
        found[name] = (float(values[:, number].mean()), spread.low, spread.high)
    return found


def differences(table: pd.DataFrame, arms: Sequence[str]) -> str:
    """Format each arm minus each other, paired by question, with intervals, in points."""
    lines = []
    for arm in arms:
        pairs = pd.DataFrame({b: table[arm] - table[b] for b in arms})
        cells = [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if other != arm else "–"
                 for other, (mean, low, high) in means(pairs, arms).items()]  # fmt: skip
        lines.append([arm, *cells])
    return markdown_table(["minus", *arms], lines)


def over_seeds(table: pd.DataFrame, arms: Sequence[str], others: Sequence[str]) -> str:
    """Format mean of `arms` minus mean of `others`, questions and arms (seeds) drawn alike."""
    columns = [*arms, *others]
    drawn = resampled_sums(100 * table[columns].to_numpy(float), NUM_RESAMPLES, seed=0) / len(table)
    random, weights = np.random.default_rng(0), []
    for group, sign in ((arms, 1), (others, -1)):
        counts = random.multinomial(len(group), np.full(len(group), 1 / len(group)), NUM_RESAMPLES)
        weights.append(sign * counts / len(group))
    spread = interval((drawn * np.hstack(weights)).sum(axis=1))
    assert spread is not None, "percentages are finite"
    mean = 100 * (table[list(arms)].to_numpy().mean() - table[list(others)].to_numpy().mean())
    return f"{mean:+.1f} [{spread.low:+.1f}, {spread.high:+.1f}]"


def draw(table: pd.DataFrame, labels: Mapping[str, str], path: Path) -> None:
    """Draw EM with its interval, an arm a line; `labels` are their texts, in order."""
    em = means(table, [PREFIX + arm for arm in labels])
    centre, low, high = np.array(list(em.values())).T
    figure = Figure(figsize=(7, 0.6 + 0.32 * len(labels)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(labels)))[::-1]
    axes.hlines(places, low, high, lw=2)
    axes.plot(centre, places, "o")
    axes.set(yticks=places, yticklabels=list(labels.values()), xlim=(0, None),
             xlabel=f"exact match of {len(table)} questions, %, with 95 % intervals")  # fmt: skip
    axes.grid(axis="x", alpha=0.3)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "arms"}):
        figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Add arms, print the differences and draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--add", nargs="+", default=[], metavar="ARM=EVALUATION")
    parser.add_argument("--measure", choices=("em", "f1"), default="em")
    parser.add_argument("--mean", nargs="+", default=[], metavar="NAME=ARM,ARM",
                        help="also compare the mean of several arms")  # fmt: skip
    parser.add_argument("--picture", type=Path)
    parser.add_argument(
        "--labels", nargs="+", metavar="ARM=TEXT", help="arms to draw; default: all"
    )
    options = parser.parse_args(arguments)
    table = pd.read_csv(options.csv)
    for each in options.add:
        arm, _, folder = each.partition("=")
        table = add(table, arm, Path(folder))
    if options.add:
        table.to_csv(options.csv, index=False, float_format="%.4g")
    prefix = f"{options.measure}_"
    names = [str(name) for name in table if str(name).startswith(prefix)]
    scores = table[names].rename(columns=lambda name: name.removeprefix(prefix))
    arms = list(scores)
    one, every = 100 * (scores == 1).any(axis=1).mean(), 100 * (scores == 1).all(axis=1).mean()
    groups = {name: members.split(",") for name, _, members in
              (each.partition("=") for each in options.mean)}  # fmt: skip
    for name, members in groups.items():
        if name in arms or not {*members} <= {*arms}:
            got, expected = (
                f"{name}={','.join(members)}",
                f"a new name and arms of {', '.join(arms)}",
            )
            parser.error(f"--mean: got {got}, expected {expected}; fix: correct the names")
        scores[name] = scores[members].mean(axis=1)
    compared = [str(name) for name in scores]
    lines = [[name, f"{mean:.1f} [{low:.1f}, {high:.1f}]"]
             for name, (mean, low, high) in means(scores, compared).items()]  # fmt: skip
    head = markdown_table(["arm", options.measure], lines)
    sys.stdout.write(f"{head}\n{differences(scores, compared)}\n")
    for name, other in itertools.combinations(groups, 2):
        spread = over_seeds(scores, groups[name], groups[other])
        sys.stdout.write(f"{name} minus {other}, over questions and arms: {spread}\n")
    sys.stdout.write(f"right by one arm: {one:.1f} %, by all: {every:.1f} %\n")
    if options.picture:
        labels = dict(each.split("=", 1) for each in options.labels or [f"{a}={a}" for a in arms])
        draw(table, labels, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
