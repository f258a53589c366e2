"""The index follows the files that a run writes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.view.index import TrajectoryQuery, find_trajectories
from search_r1.view.run import Run
from tests.runs import written as runs
from verl.errors import ConfigError


def keys_of(run: Run, **filters: Any) -> list[tuple[str, int, int]]:
    rows = find_trajectories(run.index, TrajectoryQuery(order="oldest", **filters))["rows"]
    return [(row["kind"], row["step"], row["line"]) for row in rows]


def test_every_recorded_line_is_indexed(run: Run) -> None:
    """Rows contain the facts of the dialogues that were written."""
    rows = find_trajectories(run.index, TrajectoryQuery(order="oldest"))["rows"]
    assert [(r["kind"], r["step"], r["line"]) for r in rows] == [
        *(("train", 1, i) for i in range(3)), *(("train", 2, i) for i in range(3)), ("val", 2, 0),
    ]  # fmt: skip
    first = rows[0]
    assert first["queries"] == "capital\nFrance" and first["searches"] == 2
    assert (first["is_found"], first["is_given"], first["answer"]) == (1, 0, "Rome")
    assert first["group"] == "1/0" and first["uid"] == "train.parquet#1" and first["turns"] == 3
    written = runs.dialogue("", ["x"], "Rome", [("capital", []), ("France", [])])
    policy = [s for s in written.segments if s.log_probs]
    log_probs = [x for s in policy for x in s.log_probs]
    assert first["tokens"] == len(log_probs)
    assert first["log_prob"] == pytest.approx(sum(log_probs) / len(log_probs))
    assert (rows[-1]["tokens"], rows[-1]["log_prob"], rows[-1]["score"]) == (None, None, 1.0)


def test_new_replaced_and_deleted_files_are_followed(run: Run, folder: Path) -> None:
    """A step that is run again replaces its rows, and an unchanged run keeps its version."""
    version = run.version
    run.refresh()
    assert run.version == version
    runs.write_rollouts(folder, 2, [(runs.dialogue("new?", ["x"], "y"), 0.0)])
    runs.write_rollouts(folder, 3, [(runs.dialogue("newest?", ["x"], "y"), 0.0)] * 2)
    (folder / "validation" / "step_2.jsonl").unlink()
    run.refresh()
    assert run.version > version
    assert keys_of(run) == [("train", 1, 0), ("train", 1, 1), ("train", 1, 2), ("train", 2, 0),
                          ("train", 3, 0), ("train", 3, 1)]  # fmt: skip
    assert run.trajectory("train", 2, 0)["question"] == "new?"
    assert run.trajectory("train", 2, 1) is None


def test_incomplete_lines_wait_and_invalid_ones_are_counted(run: Run, folder: Path) -> None:
    """A file may grow while it is read; a line may contain no trajectory."""
    path = folder / "rollouts" / "step_00000003.jsonl"
    line = (folder / "rollouts" / "step_00000001.jsonl").read_text().splitlines()[0]
    path.write_text(f"{line}\n" + '{"uid": 1}\nnonsense\n' + line[:200])
    run.refresh()
    assert keys_of(run, step_from=3) == [("train", 3, 0)] and run.index.summary()["bad"] == 2
    with path.open("a") as file:
        file.write(line[200:] + "\n")
    run.refresh()
    assert keys_of(run, step_from=3) == [("train", 3, 0), ("train", 3, 3)]


def test_a_line_that_was_replaced_since_is_none(run: Run, folder: Path) -> None:
    """A file that changed after it was indexed is not shown as the indexed trajectory."""
    path = folder / "rollouts" / "step_00000002.jsonl"
    path.write_text("x" * 5000)
    assert run.trajectory("train", 2, 1) is None
    path.unlink()
    assert run.trajectory("train", 2, 1) is None


def test_an_index_is_kept_and_shared(
    run: Run, folder: Path, open_run: Callable[[Path], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second viewer reads no file again, and several can update the index at once."""
    second = open_run(folder)
    monkeypatch.setattr("search_r1.view.index._facts", lambda *_: pytest.fail("read again"))
    third = open_run(folder)
    assert keys_of(second) == keys_of(third) == keys_of(run)
    monkeypatch.undo()
    for step in range(3, 13):
        runs.write_rollouts(folder, step, [(runs.dialogue("new?", ["x"], "y"), 0.0)])
    threads = [threading.Thread(target=viewer.refresh) for viewer in (run, second, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys_of(run) == keys_of(second) and len(keys_of(run)) == 7 + 10


def test_a_run_that_starts_after_the_page_is_found(
    tmp_path: Path, open_run: Callable[[Path], Run]
) -> None:
    """The configuration, which names the trajectories' folder, may be written later."""
    folder = tmp_path / "run"
    (folder / "validation").mkdir(parents=True)
    run = open_run(folder)
    assert run.rollouts is None and run.summary()["last_step"] is None
    runs.write_run(tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        if path.name != "validation":
            path.rename(folder / path.name)
    run.refresh()
    assert len(keys_of(run)) == 6  # the folder was moved, too


def test_another_folder_is_refused(tmp_path: Path, folder: Path) -> None:
    """A folder that is not a run's, and an unusable index folder, raise ConfigError."""
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        Run(tmp_path / "nothing", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--index-dir"):
        Run(folder, tmp_path / "file" / "below")


def test_a_query_survives_a_cleared_cache(run: Run) -> None:
    """Requests in several threads share the cache, and any of them may clear it."""

    class Cleared(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            self.clear()  # as another thread might

    run.index._cache = Cleared()
    assert run.index.summary()["count"] == 7
