"""Trajectories on disk: what the trainer found of their tokens, and what JSON has no word for."""

from __future__ import annotations

import datetime
import json
import math
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
from verl.types import Origin, Prompt, Segment, Trajectory

NAN = math.nan


class Words:
    """A tokenizer of one word."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def dialogue(sample: int, said: int) -> Trajectory:
    """Two prompt tokens, `said` of the policy, one seen, two of the policy."""
    segments = [
        Segment(Origin.PROMPT, (1, 2), "PP"),
        Segment(Origin.POLICY, (3,) * said, "x", (-0.5,) * said),
        Segment(Origin.OBSERVATION, (4,), "o"),
        Segment(Origin.POLICY, (5, 6), "y", (-0.25, NAN)),
    ]
    prompt = Prompt("f#0", (1, 2), "nq", ("a",), {}, "PP")
    return Trajectory(prompt, segments, group="1/0", sample=sample)


def written(folder: Path, signals: dict[tuple[str, int], Signals]) -> list[list[dict[str, Any]]]:
    """The segments of two trajectories, as they are on disk."""
    folder.mkdir()
    given = [dialogue(0, 3), dialogue(1, 0)]
    write_step(folder, 1, given, [Reward(0.0), Reward(1.0)], signals=signals)
    return [json.loads(line)["segments"] for line in step_path(folder, 1).read_text().splitlines()]


def test_each_segment_has_its_own_part_of_the_signals(tmp_path: Path) -> None:
    """One number where all its tokens have the same, none where nothing is known; who learns from
    the record passes over it."""
    numbers = {
        "advantages": (NAN, NAN, 0.1, 0.1, 0.1, NAN, 0.1, -2.0),
        "values": (NAN, NAN, 0.5, NAN, 0.25, NAN, NAN, NAN),
    }
    known = {name: np.array(column, np.float32) for name, column in numbers.items()}
    plain = written(tmp_path / "plain", {})
    first, second = written(tmp_path / "signals", {("1/0", 0): known})
    own = [{}, {"advantages": 0.1, "values": [0.5, None, 0.25]}, {}, {"advantages": [0.1, -2.0]}]
    assert first == [one | more for one, more in zip(plain[0], own, strict=True)]
    assert second == plain[1]
    read = (read_step(tmp_path / name, 1) for name in ("plain", "signals"))
    assert [str(one) for one in next(read)] == [str(one) for one in next(read)]


@pytest.mark.parametrize(
    "value", ["half \ud83d", "é\u2028\x7f 😀", 2**70, datetime.date(2026, 1, 2), {3: (4,)}]
)
def test_what_a_question_brings_is_written(value: object, tmp_path: Path) -> None:
    """As the standard library has it, also where the fast writer refuses."""
    numbers = np.array([0.1, NAN], np.float32)
    write_jsonl(tmp_path / "a", [{"info": value, "one": numbers[0], "many": numbers}])
    (text,) = (tmp_path / "a").read_text(encoding="ascii").splitlines()
    line = json.loads(text)
    expected = json.loads(json.dumps(value, default=str))
    assert line == {"info": expected, "one": 0.1, "many": [0.1, None]}


def test_a_run_that_begins_sets_later_steps_of_another_aside(tmp_path: Path) -> None:
    """Who learns from the folder meets one run only; nothing is deleted."""
    prepare_folder(tmp_path, Words(), "first")
    for step in (1, 2, 3):
        write_step(tmp_path, step, [dialogue(0, 1)], [Reward(float(step))])
    prepare_folder(tmp_path, Words(), "first", after=2)
    assert recorded_steps(tmp_path) == [1, 2]
    prepare_folder(tmp_path, Words(), "second", after=0)
    assert recorded_steps(tmp_path) == []
    places = [path.parent for path in tmp_path.rglob("run.json") if path.parent != tmp_path]
    assert {recorded_steps(place)[0]: read_fingerprints(place)["model"] for place in places} == {
        1: "first", 3: "first",
    }  # fmt: skip
    assert read_fingerprints(tmp_path)["model"] == "second"
    prepare_folder(tmp_path, Words(), "second", after=0)
    assert len(list((tmp_path / "set_aside").iterdir())) == 2
