"""The builder: what it writes is reproducible and is what the repository holds."""

import json
from pathlib import Path

import pandas as pd

import example as example_package
from example.build import build_example, count_table, write_example

COMMITTED_CORPUS = Path(example_package.__file__).parent / "corpus.jsonl"


def test_the_committed_corpus_is_reproduced_byte_for_byte(example, tmp_path):
    """Nobody edits the corpus by hand, and a new package version is noticed."""
    write_example(example, tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == COMMITTED_CORPUS.read_bytes()


def test_two_builds_write_the_same_bytes(example, tmp_path):
    """Every choice comes from the seed."""
    write_example(example, tmp_path / "first")
    write_example(build_example(), tmp_path / "second")
    names = ("train.parquet", "val.parquet", "sft.jsonl")
    for name in names:
        first, second = (tmp_path / turn / "data" / name for turn in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_rows_have_the_search_r1_columns(example, tmp_path):
    """A reader of Search-R1 parquet finds every field, with a running index."""
    write_example(example, tmp_path)
    for split, count in (("train", 2000), ("val", 120)):
        frame = pd.read_parquet(tmp_path / "data" / f"{split}.parquet")
        columns = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert list(frame.columns) == columns
        assert [info["index"] for info in frame["extra_info"]] == list(range(count))
        assert {info["split"] for info in frame["extra_info"]} == {split}
        assert all(len(prompt) == 1 and prompt[0]["role"] == "user" for prompt in frame["prompt"])
        assert all(len(row["ground_truth"]["target"]) >= 1 for row in frame["reward_model"])


def test_the_corpus_is_small_and_in_wiki_form():
    """At most 1 MB; each line an id and contents with a quoted title."""
    raw = COMMITTED_CORPUS.read_bytes()
    rows = [json.loads(line) for line in raw.splitlines()]
    assert len(raw) < 1_000_000 and len(rows) > 3000
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        title, text = row["contents"].split("\n")
        assert title.startswith('"') and title.endswith('"') and text.endswith(".")


def test_the_table_counts_every_kind(example):
    """The table of the command line has a row for each thing that was built."""
    assert count_table(example).row_count == 9
