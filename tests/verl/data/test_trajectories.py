"""Recorded trajectories: signals per token, values unknown to JSON, and folders of several runs."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.data.trajectories import (
    Signals,
    prepare_folder,
    read_fingerprints,
    read_step,
    recorded_steps,
    step_path,
    write_jsonl,
    write_step,
)
from verl.rewards.interface import Reward
from verl.types import Draw, Origin, Prompt, Segment, Trajectory

NAN = math.nan


class OneWordTokenizer:
    """A tokenizer with one word."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def dialogue(sample: int, num_policy: int) -> Trajectory:
    """Return segments of 2 prompt, `num_policy` policy, 1 observation and 2 policy tokens."""
    segments = [
        Segment(Origin.PROMPT, (1, 2), "PP"),
        Segment(Origin.POLICY, (3,) * num_policy, "x", (-0.5,) * num_policy),
        Segment(Origin.OBSERVATION, (4,), "o"),
        Segment(Origin.POLICY, (5, 6), "y", (-0.25, NAN)),
    ]
    prompt = Prompt("f#0", (1, 2), "nq", ("a",), {}, "PP")
    return Trajectory(prompt, segments, draw=Draw("1/0", sample))


def write_segments(
    folder: Path, signals: dict[tuple[str, int], Signals]
) -> list[list[dict[str, Any]]]:
    """Write two trajectories and return their segments as they are on disk."""
    folder.mkdir()
    trajectories = [dialogue(0, 3), dialogue(1, 0)]
    write_step(folder, 1, trajectories, [Reward(0.0), Reward(1.0)], signals=signals)
    return [json.loads(line)["segments"] for line in step_path(folder, 1).read_text().splitlines()]


def test_each_segment_has_its_part_of_the_signals(tmp_path: Path) -> None:
    """A segment has one number if its tokens share the value, and no key if all are unknown.

    Training on recorded trajectories ignores the signals.
    """
    numbers = {
        "advantages": (NAN, NAN, 0.1, 0.1, 0.1, NAN, 0.1, -2.0),
        "values": (NAN, NAN, 0.5, NAN, 0.25, NAN, NAN, NAN),
    }
    signals = {name: np.array(column, np.float32) for name, column in numbers.items()}
    plain = write_segments(tmp_path / "plain", {})
    first, second = write_segments(tmp_path / "signals", {("1/0", 0): signals})
    added = [{}, {"advantages": 0.1, "values": [0.5, None, 0.25]}, {}, {"advantages": [0.1, -2.0]}]
    assert first == [segment | more for segment, more in zip(plain[0], added, strict=True)]
    assert second == plain[1]
    without, with_signals = (read_step(tmp_path / name, 1) for name in ("plain", "signals"))
    assert [str(t) for t in without] == [str(t) for t in with_signals]


@pytest.mark.parametrize("truth", [None, "a", ["a"], {"target": "a", "must_cite": ["doc7"]}])
def test_a_recorded_row_has_the_ground_truth_of_its_row(truth: Any, tmp_path: Path) -> None:
    """Scored again, it is what the reward got."""
    trajectory = dialogue(0, 3)
    prompt = replace(trajectory.prompt, row_truth=truth)
    write_step(tmp_path, 1, [replace(trajectory, prompt=prompt)], [Reward(0.0)])
    assert read_step(tmp_path, 1)[0].trajectory.prompt == prompt


@pytest.mark.parametrize(("form", "truth"), [("text", "a"), ("list", ["a"]), ("target", None)])
def test_a_row_of_an_earlier_version_has_the_form_of_its_ground_truth(
    form: str, truth: Any, tmp_path: Path
) -> None:
    """Its files have only the form of the row, and the answers."""
    write_step(tmp_path, 1, [dialogue(0, 3)], [Reward(0.0)])
    path = step_path(tmp_path, 1)
    row = json.loads(path.read_text())
    del row["row_truth"]
    path.write_text(json.dumps({**row, "truth_form": form}))
    assert read_step(tmp_path, 1)[0].trajectory.prompt.row_truth == truth


@pytest.mark.parametrize(
    "value", ["half \ud83d", "é\u2028\x7f 😀", 2**70, datetime.date(2026, 1, 2), {3: (4,)}]
)
def test_any_value_of_a_question_is_written(value: object, tmp_path: Path) -> None:
    """Values are written as by the standard library, also if the fast JSON writer refuses them."""
    numbers = np.array([0.1, NAN], np.float32)
    write_jsonl(tmp_path / "a", [{"info": value, "one": numbers[0], "many": numbers}])
    (text,) = (tmp_path / "a").read_text(encoding="ascii").splitlines()
    line = json.loads(text)
    expected = json.loads(json.dumps(value, default=str))
    assert line == {"info": expected, "one": 0.1, "many": [0.1, None]}


def test_a_new_run_moves_later_steps_of_an_earlier_run_aside(tmp_path: Path) -> None:
    """Readers of the folder see only one run; nothing is deleted."""
    prepare_folder(tmp_path, OneWordTokenizer(), "first")
    for step in (1, 2, 3):
        write_step(tmp_path, step, [dialogue(0, 1)], [Reward(float(step))])
    prepare_folder(tmp_path, OneWordTokenizer(), "first", after=2)
    assert recorded_steps(tmp_path) == [1, 2]
    prepare_folder(tmp_path, OneWordTokenizer(), "second", after=0)
    assert recorded_steps(tmp_path) == []
    aside = [path.parent for path in tmp_path.rglob("run.json") if path.parent != tmp_path]
    assert {recorded_steps(path)[0]: read_fingerprints(path)["model"] for path in aside} == {
        1: "first", 3: "first",
    }  # fmt: skip
    assert read_fingerprints(tmp_path)["model"] == "second"
    prepare_folder(tmp_path, OneWordTokenizer(), "second", after=0)
    assert len(list((tmp_path / "set_aside").iterdir())) == 2
