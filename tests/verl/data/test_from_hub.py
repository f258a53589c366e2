"""Question files by the name of a data set of the hub."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from tests.hub import COMMIT, serving_hub
from verl import hub_access
from verl.data.from_hub import local_file
from verl.data.rows import file_list, is_on_hub, load_rows
from verl.errors import DataError
from verl.ports import free_port

ROWS = [{"data_source": "nq", "prompt": "Who?", "reward_model": {"ground_truth": [f"{i}", "b"]}}
        for i in range(3)]  # fmt: skip
LINES = "\n".join(map(json.dumps, ROWS)).encode()
FILES = {"datasets/me/two/train.jsonl": LINES, "datasets/me/two/test.jsonl": LINES,
         "datasets/me/one/train.jsonl": LINES}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with the hub's API, and an empty folder for what is loaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(hub_access, "getproxies", dict)
    with serving_hub(FILES) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        yield
    local_file.cache_clear()


def test_a_split_is_read_as_a_file_and_kept(
    hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the folder of its commit, from which it is read without a hub, with a warning."""
    path = tmp_path / "question_files" / COMMIT / "me--two--train.parquet"
    assert file_list(["me/two:train", "a.jsonl"]) == [str(path), "a.jsonl"]
    rows = load_rows("me/two:train")
    assert [row.ground_truth for row in rows] == [(f"{i}", "b") for i in range(3)]
    assert rows[0].uid == "me--two--train.parquet#0"
    assert file_list("me/one")[0].endswith("me--one--train.parquet")  # its only split
    local_file.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert file_list("me/two:train") == [str(path)]
    assert "using what was loaded before" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("me/two", "train"), ("me/two:dev", "no split dev"), ("me/none:train", "of the hub")],
)
def test_names_that_the_hub_does_not_have_are_refused(hub: None, name: str, expected: str) -> None:
    """A set of several splits wants one: no split is chosen in silence."""
    with pytest.raises(DataError, match=expected):
        file_list(name)


def test_without_a_hub_the_answer_comes_at_once(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path may look like a name, so the message speaks of both."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no such file, and .* does not answer"):
        load_rows("data/trian")
    assert time.monotonic() - start < 5


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what exists, or has the end of a file's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    paths = ("train", "./train", "/data/train", "a/b/c", "a/b.csv", "~/a", "data/mine", "a/")
    assert not any(map(is_on_hub, paths))
    assert all(map(is_on_hub, ("a/b", "a/b:train", "a/b@v1.0:train", "a/b-1.1")))
