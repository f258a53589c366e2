"""The demo's report agrees with the files of the run."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from example.hard_questions import Kind
from scripts.demo_report import KINDS, write_report
from scripts.demo_texts import CHINESE, say


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def validation(em: float, single: float, two_hop: float) -> dict[str, float]:
    return {
        "val/em": em,
        "val/geo_single/em": single,
        "val/geo_two_hop/em": two_hop,
        "val/geo_single/env/valid_searches": 1 + single,
        "val/geo_two_hop/env/valid_searches": 2.0,
        "val/env/valid_searches": 1.5,
        "val/num_rows": 2,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps: EM from 0 to 1 on two held-out questions, 0.5 without documents."""
    training = {
        "critic/score/mean": 0.5,
        "env/valid_searches": 1.0,
        "rollout/staleness/mean": 0.5,
        "perf/trainer_busy_share": 0.75,
    }
    write_rows(
        tmp_path / "metrics.jsonl",
        [
            {"step": 0, **validation(0.0, 0.0, 0.0)},
            {"step": 1, **training, "perf/engine_busy_share": 0.25},
            {"step": 2, **training, "perf/engine_busy_share": 0.5, **validation(1.0, 1.0, 1.0)},
        ],
    )
    write_rows(tmp_path / "empty" / "metrics.jsonl", [{"step": 0, **validation(0.5, 0.5, 0.5)}])
    for step in (0, 2):
        rows = [
            {
                "question": f"Q{i}?",
                "ground_truth": ["a"],
                "dialogue": f"step {step}",
                "score": step / 2,
            }
            for i in range(2)
        ]
        write_rows(tmp_path / "validation" / f"step_{step}.jsonl", rows)
    return tmp_path


def test_summary_and_report(run: Path) -> None:
    """The figures come from the first and last validation and from the control run."""
    write_report(run, "grpo", 7, {"train": 1.25}, 9.0, Console(quiet=True))
    summary = json.loads((run / "summary.json").read_text())
    expected = {
        "algorithm": "grpo",
        "seed": 7,
        "steps": 2,
        "val_em_first": 0.0,
        "val_em_last": 1.0,
        "val_em_empty_retriever": 0.5,
        "val_valid_search_last": 1.5,
        "trainer_busy_share": 0.75,
        "engine_busy_share": 0.375,
        "staleness": 0.5,
        "wall_s": 9.0,
    }
    assert {name: summary[name] for name in expected} == expected
    report = (run / "report.md").read_text()
    assert "trainer was busy for 0.75 and idle for\n0.25" in report
    assert "step 0" in report
    assert "step 2" in report
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_the_chinese_world(run: Path) -> None:
    """In Chinese, with commands that serve its corpus and ask its model."""
    write_report(run, "grpo", 7, {"train": 1.25}, 9.0, Console(quiet=True), "zh")
    report = (run / "report.md").read_text(encoding="utf-8")
    assert "| 强化学习之后 | 1.000 |" in report and "训练前, EM 0" in report
    assert f"CORPUS_PATH={run}/data/corpus.jsonl bash retrieval_launch.sh" in report
    assert f"--model {run}/model" in report
    assert not re.search("warm start|search needed|before|retriever first", report)


def test_the_report_of_the_harder_world(run: Path) -> None:
    """It tells EM and searches by kind before and after, and names each kind that world has."""
    write_report(run, "grpo", 7, {}, 9.0, Console(quiet=True), "hard")
    assert json.loads((run / "summary.json").read_text())["kinds"] == {
        "geo_single": {"em": [0.0, 1.0], "searches": [1.0, 2.0]},
        "geo_two_hop": {"em": [0.0, 1.0], "searches": [2.0, 2.0]},
    }
    report = (run / "report.md").read_text()
    assert "| one search needed | 0.000 | 1.000 | 1.00 | 2.00 |" in report
    assert "| two searches needed | 0.000 | 1.000 | 2.00 | 2.00 |" in report
    assert set(KINDS) == set(Kind)


@pytest.mark.parametrize("world", ["en", "zh"])
def test_every_text_of_the_report_is_translated(run: Path, world: str) -> None:
    """Each text of the dictionary but the phases' titles stands in a report."""
    write_report(run, "grpo", 7, {}, 9.0, Console(quiet=True), world)
    report = (run / "report.md").read_text(encoding="utf-8")
    printed = list(CHINESE)[list(CHINESE).index("steps") :]
    assert [text for text in printed if say(world, text) not in report] == []
