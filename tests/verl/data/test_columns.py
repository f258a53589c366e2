"""Training rows chosen by columns of their files."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.core.data.test_data import record, write_jsonl
from verl.config import Config
from verl.data.columns import ALL_ROWS, Columns
from verl.data.rows import load_rows
from verl.errors import DataError
from verl.preflight.questions import problems

RECORDS: list[dict[str, Any]] = [
    record("a", evidence="topk", weight=1.0),
    record("b", evidence="linked", weight=3.0),
    record("c", evidence="nowhere", weight=0.0),
    record("d", evidence=None, weight=1.0),
]


def chosen(file: str, columns: Columns) -> str:
    """Return the questions that are left."""
    rows = columns.matching(load_rows(file, columns=columns.names))
    return "".join(row.prompt[0]["content"] for row in rows)  # type: ignore[index]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("wanted", "questions"),
    [
        ({}, "abcd"),
        ({"evidence": "topk"}, "a"),
        ({"evidence": ["topk", "linked"]}, "ab"),
        ({"evidence": [None, "topk"], "weight": 1}, "ad"),
        ({"data_source": "nq", "split": "train"}, "abcd"),
        ({"weight": {"gt": 0, "le": 1}}, "ad"),
        ({"weight": {"ge": 0, "lt": 3.0}, "evidence": ["topk", "nowhere"]}, "ac"),
    ],
)
def test_rows_with_the_wanted_values_are_left(
    tmp_path: Path, suffix: str, wanted: dict[str, Any], questions: str
) -> None:
    """Columns of the file and keys of `extra_info` are read in both formats."""
    path = str(tmp_path / f"f.{suffix}")
    if suffix == "parquet":
        pd.DataFrame(RECORDS).to_parquet(path)
    else:
        write_jsonl(Path(path), RECORDS)
    assert chosen(path, Columns(wanted)) == questions


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        (Columns({"evidense": "topk"}), "data.filter"),
        (Columns({"evidence": "top"}), "data.filter"),
        (Columns({"weight": True}), "data.filter"),
        (Columns({"weight": {"min": 1}}), "data.filter"),
        (Columns({"weight": {"ge": "1"}}), "data.filter"),
        (Columns({"evidence": {"ge": 0}}), "data.filter"),
        (Columns(weight="share"), "data.weight_column"),
        (Columns(weight="evidence"), "data.weight_column"),
    ],
)
def test_columns_that_cannot_be_used_are_refused(
    tmp_path: Path, columns: Columns, key: str
) -> None:
    """A misspelt column, a value that no row has and a weight that is no number are named."""
    file = write_jsonl(tmp_path / "f.jsonl", RECORDS)
    with pytest.raises(DataError, match=key):
        chosen(file, columns)


def test_only_training_rows_are_chosen_and_counted(tmp_path: Path) -> None:
    """The check before a run counts the rows that are left, and validation keeps all."""
    config = Config()
    config.data.train_files = write_jsonl(tmp_path / "train.jsonl", RECORDS)
    config.data.val_files = write_jsonl(tmp_path / "val.jsonl", [record("v")])
    config.data.train_batch_size = 2
    config.data.filter = {"evidence": ["topk", "linked"]}
    assert not list(problems(config))
    config.data.filter = {"evidence": "topk"}
    (problem,) = problems(config)
    assert "data.train_batch_size" in str(problem)
    assert not ALL_ROWS.names
