"""A run's report: figures against hand-computed ones, examples, advice, escaped text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from search_r1.view.report import report, write_report
from search_r1.view.run import Run
from tests.view import runs
from tests.view.test_export import snapshot_of
from verl.types import Trajectory

PARIS = ("France", "Its capital is Paris.")


def trajectory(row: int, answer: str, searches: int = 0) -> Trajectory:
    found = [("capital", [PARIS])] * searches
    return runs.dialogue(f"Question {row}?", ["Paris"], answer, found, row=row)


@pytest.fixture
def learned(folder: Path) -> Path:
    """A run that learned to search: 1 of 10 answers right at first, 7 at the end."""
    (folder / "validation" / "step_2.jsonl").unlink()
    (folder / "metrics.jsonl").unlink()
    for step, right in ((0, 1), (5, 4), (10, 7)):
        rows = [(trajectory(i, "Paris" if i < right else "Rome", int(i < right)), float(i < right))
                for i in range(10)]  # fmt: skip
        runs.write_validation(folder, step, rows)
    for step in range(1, 11):
        runs.add_metrics(folder, step, **{
            "timing_s/step": 36.0, "timing_s/gen": 30.0, "perf/total_num_tokens": 1000.0,
            "env/valid_searches": 0.5, "critic/score/mean": 0.3, "actor/entropy": 1.0,
            "perf/tokens_per_second_per_gpu": 50.0, "perf/mfu/actor": 0.25,
            "perf/device_memory_gb/update_actor/allocated": 3.0, "response_length/mean": 10.0,
            "guard/health": 0.0,
        })  # fmt: skip
    for step, em in ((0, 0.1), (5, 0.8), (10, 0.7)):
        runs.add_metrics(folder, step, **{"val/em": em})
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "data: {train_batch_size: 4}\n")
    text = config.read_text()
    text = text.replace("actor_rollout_ref:\n", "actor_rollout_ref:\n  rollout: {n_agent: 5}\n")
    config.write_text(text.replace("trainer:\n", "trainer:\n  n_gpus_per_node: 4\n  nnodes: 2\n"))
    return folder


def test_the_table_has_intervals_by_resampling(
    learned: Path, open_run: Callable[[Path], Run]
) -> None:
    """Means are exact; the interval of a share of ten equals that of ten binomial draws."""
    contents = report(open_run(learned))
    assert contents.heads == [
        "set",
        "questions",
        "measure",
        "step 0",
        "step 5",
        "step 10",
        "change",
    ]
    em, found, searches = contents.rows
    assert em[:3] == ["nq", "10", "EM"] and found[2:] != em[2:] and searches[2] == "searches"
    assert em[3].startswith("0.100") and em[5].startswith("0.700") and em[6].startswith("+0.600")
    low, high = map(float, re.findall(r"[-\d.]+", em[5])[1:])
    drawn = np.random.default_rng(1).binomial(10, 0.7, 20_000) / 10
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.101)


def test_costs_add_up(learned: Path, open_run: Callable[[Path], Run]) -> None:
    """Ten steps of 36 s on 8 GPUs with 20 trajectories each."""
    cost = dict(report(open_run(learned)).cost)
    assert cost["time in steps"] == "0.10 h (36.0 s a step)"
    assert cost["GPU-hours"] == "0.80 on 8 GPUs"
    assert cost["tokens learned from"] == "10,000" and cost["tokens sampled"] == "2,000"
    assert cost["searches"] == "100" and cost["share of the time: sampling"] == "83%"
    assert cost["tokens/s per GPU"] == "50" and cost["MFU of the policy's update"] == "25.0%"


def test_gpus_of_a_separate_critic_count(learned: Path, open_run: Callable[[Path], Run]) -> None:
    """It takes four more GPUs on each of two nodes, or on one."""
    config = learned / "config.yaml"
    config.write_text(config.read_text() + "critic: {n_gpus_per_node: 4, nnodes: null}\n")
    assert dict(report(open_run(learned)).cost)["GPU-hours"] == "1.60 on 16 GPUs"
    config.write_text(config.read_text().replace("nnodes: null", "nnodes: 1"))
    assert dict(report(open_run(learned)).cost)["GPU-hours"] == "1.20 on 12 GPUs"


def test_examples_are_questions_that_were_learned(
    learned: Path, open_run: Callable[[Path], Run]
) -> None:
    """They are wrong before and right after, and spread over the learned questions."""
    examples = report(open_run(learned)).examples
    assert [example.question for example in examples] == [f"Question {i}?" for i in (1, 3, 5)]
    for example in examples:
        assert example.before is not None and example.before["answer"] == "Rome"
        assert example.after["answer"] == "Paris" and example.after["step"] == 10


def test_advice_follows_from_the_figures(learned: Path, open_run: Callable[[Path], Run]) -> None:
    """It names the better checkpoint, the missing documents, and the time of sampling."""
    best, answers, time = report(open_run(learned)).advice
    assert best.startswith("val/em was highest at step 5 (0.800, at the end 0.700)")
    assert answers.startswith("3 of 3 wrong answers were given without")
    assert time.startswith("Sampling takes 83% of a step")


def test_both_files_are_written_and_contain_no_active_text(folder: Path) -> None:
    """The page contains report and examples; hostile texts are data in it, and code in Markdown."""
    hostile = runs.dialogue(runs.HOSTILE, [runs.HOSTILE], runs.HOSTILE + "\n```\n<b>")
    for step in (0, 9):
        runs.write_validation(folder, step, [(hostile, float(step))])
    write_report(folder)
    page = (folder / "report.html").read_text()
    data = snapshot_of(page)
    [contents] = data["report"]
    assert contents["examples"][0]["question"] == runs.HOSTILE
    shown = {(r["kind"], r["step"], r["line"]) for r in data["rows"][0]}
    assert {("val", 0, 0), ("val", 9, 0)} <= shown
    assert {step for kind, step, _ in shown} == {0, 1, 2, 9}  # the ends of each kind
    assert "<img" not in page and page.count("<script") == 2
    text = (folder / "report.md").read_text()
    acting = [line for line in text.splitlines() if "<" in line and not line.startswith("    ")]
    assert acting == [] and "\u202e" not in text and "```" not in text.replace("    ```", "")
    assert list(folder.glob(".report*")) == []


def test_a_run_without_validation_or_steps(tmp_path: Path) -> None:
    """A missing validation is mentioned; without metrics, or if damaged, there is no report."""
    empty = runs.start_run(tmp_path / "empty")
    assert not write_report(empty)
    assert not (empty / "report.html").exists()
    runs.add_metrics(empty, 1, **{"timing_s/step": 1.0})
    assert write_report(empty)
    assert "There was no validation" in (empty / "report.md").read_text()
    (empty / "config.yaml").write_text("{")
    assert not write_report(empty)  # no error
    (empty / "config.yaml").write_text("agent: text\n")
    assert not write_report(empty)


def test_a_bug_of_the_report_is_logged_and_the_run_ends_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, with its traceback; an interrupt still ends the program."""

    def raising(error: BaseException) -> Callable[..., None]:
        def report(run: object) -> None:
            raise error

        return report

    monkeypatch.setattr("search_r1.view.report.report", raising(RuntimeError("a bug")))
    assert not write_report(folder)
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.setattr("search_r1.view.report.report", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_report(folder)
