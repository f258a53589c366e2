"""Splits rows off the training questions, by which checkpoints and settings are chosen.

`python -m example.smollm2.split --data OUT/data --rows 300` moves rows of train.parquet to
select.parquet. They are those with the least hash of the question, so they do not depend on seed,
order or machine, and the same question in other words of case or punctuation goes with them.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from search_r1.rewards.normalize import normalize_answer
from verl.errors import explain


def selected(questions: Sequence[str], count: int) -> list[bool]:
    """Return for each question whether it is among the `count` different ones split off."""
    keys = [hashlib.sha256(normalize_answer(q).encode()).hexdigest() for q in questions]
    chosen = set(sorted(set(keys))[:count])
    return [key in chosen for key in keys]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    train = pd.read_parquet(options.data / "train.parquet")
    is_selected = pd.Series(selected([*train["question"]], options.rows))
    if not 0 < is_selected.sum() < len(train):
        got, fix = f"{options.rows} of {len(train)} questions", "--set select_rows=N"
        sys.stderr.write(explain("--rows", got, "rows for both splits", fix) + "\n")
        return 2
    train[is_selected].to_parquet(options.data / "select.parquet", index=False)
    train[~is_selected].to_parquet(options.data / "train.parquet", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
