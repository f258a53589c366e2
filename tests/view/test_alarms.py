"""Alarms have the reasons that the guard gave during the run."""

import json
from pathlib import Path

from search_r1.view.advice import alarms
from search_r1.view.run import MetricsLog
from verl.config import GuardConfig
from verl.monitor.guard import CollapseGuard


def test_reasons_are_those_that_the_guard_logged(tmp_path: Path) -> None:
    """The verdicts equal those of a guard in a run that warns, collapses, rolls back, recovers."""
    options = {"patience": 2, "action": "rollback"}
    guard = CollapseGuard(GuardConfig(**options), tmp_path)
    guard.healthy, logged, lines = 0, {}, []
    for step, entropy in enumerate([1.0, 1.0, 0.05, 0.05, 1.0, 0.05, float("nan")], 1):
        metrics = {"actor/entropy": entropy}
        verdict = guard.judge(step, metrics)
        lines.append(json.dumps({"step": step, **metrics}).replace("NaN", "null") + "\n")
        if verdict.reasons:
            logged[step] = (verdict.health, verdict.reasons)
        if verdict.is_collapsed and step < 7:
            guard.roll_back(step, verdict)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/em": 0}\n' + "".join(lines))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.refresh()
    found = alarms(log, {"trainer": {"guard": {**options, "an unknown option": 1}}})
    assert {alarm.step: (alarm.health, alarm.reasons) for alarm in found} == logged
    assert [alarm.step for alarm in found if alarm.is_rollback] == [4]
    assert alarms(log, {})  # without a configuration: the guard's defaults
