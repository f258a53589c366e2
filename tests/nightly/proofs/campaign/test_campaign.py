"""What a campaign calls lost: changed trajectories, missing prompts, old tokens, leftovers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nightly.proofs.campaign.__main__ import Report, markdown
from tests.nightly.proofs.campaign.run import (
    Effect,
    changed_trajectories,
    max_age,
    other_prompts,
)


def row(sample: int, *segments: tuple[str, list[int]]) -> str:
    parts = [{"origin": origin, "ids": ids} for origin, ids in segments]
    return json.dumps({"group": "g", "uid": "q", "sample": sample, "segments": parts}) + "\n"


def test_an_observation_of_a_fault_is_found_and_another_sample_is_not(tmp_path: Path) -> None:
    """Only a different observation after equal policy tokens counts."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    calm.mkdir()
    disturbed.mkdir()
    same = row(0, ("policy", [1]), ("observation", [2]))
    (calm / "step_1.jsonl").write_text(same + same.replace('"sample": 0', '"sample": 1'))
    error = row(0, ("policy", [1]), ("observation", [9]))
    (disturbed / "step_1.jsonl").write_text(error + row(1, ("policy", [7]), ("observation", [9])))
    assert changed_trajectories(calm, disturbed) == ["step_1 q/0"]


def test_other_prompts_and_old_tokens_are_found(tmp_path: Path) -> None:
    """Missing and repeated rows, and the maximum age of a policy token."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
        (folder / "step_1.jsonl").write_text(row(0) + row(1))
        (folder / "step_2.jsonl").write_text(row(0) + row(1))
    (disturbed / "step_1.jsonl").write_text(row(1) + row(0))
    assert other_prompts(calm, disturbed) == [] and max_age(disturbed) == 0
    (disturbed / "step_2.jsonl").write_text(row(0) + row(0))
    (calm / "step_3.jsonl").write_text(row(0))
    assert other_prompts(calm, disturbed) == ["step_2", "step_3"]
    segments = [{"origin": "prompt"}, {"origin": "policy", "weight_version": 5}]
    (disturbed / "step_7.jsonl").write_text(json.dumps({"step": 7, "segments": segments}) + "\n")
    assert max_age(disturbed) == 2


def effect(**changes: object) -> Effect:
    values = {"number": 1, "kind": "SIGKILL", "victim": "rank", "step": 2, "met": True,
              "status": None, "traceback": False, "log": ""}  # fmt: skip
    return Effect(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"differences": 1}, False),
        ({"leg": "retriever", "differences": 1, "same_weights": False}, True),
        ({"touched": ["step_1 q/0"]}, False),
        ({"missing_steps": [3]}, False),
        ({"other_prompts": ["step_3"]}, False),
        ({"staleness": 2, "oldest": 2}, True),
        ({"staleness": 2, "oldest": 3}, False),
        ({"broken": ["global_step_1"]}, False),
        ({"left": ["process 1: rank"]}, False),
        ({"effects": [effect(status=1, traceback=True)]}, False),
        ({"effects": [effect(status=4), effect(met=False)]}, True),
    ],
)
def test_a_campaign_holds_only_if_nothing_was_lost(changes: dict[str, object], holds: bool) -> None:
    """Faults of the retriever may leave rounding; no fault may leave a traceback or lose data."""
    values = {"leg": "machine", "seed": 0, "seconds": 1.0, "starts": 1, "steps": 3,
              "effects": [effect()], "not_run": ["disk full"], "missing_steps": [],
              "differences": 0, "same_weights": True, "touched": [], "broken": [],
              "left": []}  # fmt: skip
    report = Report(**{**values, **changes})  # type: ignore[arg-type]
    assert report.holds is holds
    assert ("DOES NOT HOLD" in markdown(report)) is not holds
    assert "| disk full | not run: needs root or a compiler | 0 |" in markdown(report)
