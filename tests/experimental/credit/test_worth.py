"""The command on a recorded run: its figures against a plain forward pass of the same weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from example.tiny import tiny_llama
from search_r1.experimental.credit import worth
from search_r1.experimental.credit.command import main
from search_r1.view.run import Run
from tests.runs.written import PARIS, ROME, TOKENIZER, dialogue, start_run, write_rollouts
from tests.view.conftest import open_run as open_run
from verl.ext.engines.transformers import TransformersEngine
from verl.types import Trajectory

OPTIONS = {"max_response_length": 3, "train_files": "a.parquet", "val_files": "b.parquet"}
QUESTION, GOLD = "What is the capital of France?", ["Paris"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its weights and one step: dialogues with two, one and no search, and no answer."""
    run = start_run(tmp_path_factory.mktemp("credit") / "run", data=OPTIONS)
    model = run / "model"
    tiny_llama(256, hidden_size=32, num_layers=1).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER).save_pretrained(model)
    write_rollouts(run, 4, [(record([ROME], [PARIS, ROME]), 1.0), (record([PARIS]), 0.5),
                            (record(), 0.0), (record([ROME], answer=None), 0.0)])  # fmt: skip
    return run


def record(*results: Sequence[tuple[str, str]], answer: str | None = "Paris") -> Trajectory:
    return dialogue(QUESTION, GOLD, answer, [(f"q{i}", one) for i, one in enumerate(results)])


def likelihood(folder: Path, trajectory: Trajectory) -> dict[str, float]:
    """Log-probs of the last turn and of its answer, from one forward pass over the dialogue."""
    lm: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids, turn = trajectory.ids, trajectory.segments[-1]
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0].double()
    start = len(ids) - len(turn.ids)
    by_token = [float(logits[t - 1].log_softmax(0)[ids[t]]) for t in range(start, len(ids))]
    begin = turn.text.index("<answer>") + len("<answer>")  # one token per byte
    return {"turn": sum(by_token), "answer": sum(by_token[begin : turn.text.index("</answer>")])}


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "credit" / "step_00000004.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_document_is_worth_what_the_answer_loses_without_it(
    folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """It is removed from every search result; the page shows its worth next to it."""
    assert main([str(folder), "--device=cpu", "--dtype=float32"]) == 0
    results = lines(folder)
    assert [(row["line"], row["title"]) for row in results] == [
        (0, ROME[0]), (0, PARIS[0]), (1, PARIS[0])
    ]  # fmt: skip
    complete = [record([ROME], [PARIS, ROME])] * 2 + [record([PARIS])]
    reduced = [record([], [PARIS]), record([ROME], [ROME]), record([])]
    for row, with_it, without_it in zip(results, complete, reduced, strict=True):
        first, second = likelihood(folder, with_it), likelihood(folder, without_it)
        for name in ("turn", "answer"):
            assert row["with"][name] == pytest.approx(first[name], abs=1e-3)
            assert row["without"][name] == pytest.approx(second[name], abs=1e-3)
            assert row["worth"][name] == pytest.approx(first[name] - second[name], abs=2e-3)
        assert row["recorded"]["turn"] == pytest.approx(sum(with_it.segments[-1].log_probs))
        assert row["answer"] == "Paris" and row["has_answer"] is (row["title"] == PARIS[0])
    run = open_run(folder)
    calls = run.trajectory("train", 4, 0)["calls"]  # type: ignore[index]
    shown = [[document["worth"] for document in call["documents"]] for call in calls]
    assert shown == [[results[0]["worth"]], [results[1]["worth"], results[0]["worth"]]]
    dump = folder / "rollouts" / "step_00000004.jsonl"
    os.utime(dump, ns=(2**62, 2**62))
    calls = run.trajectory("train", 4, 1)["calls"]  # type: ignore[index]
    assert calls[0]["documents"][0]["worth"] is None  # the step was run again


def test_weights_are_loaded_once_for_several_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models are never loaded at the same time."""
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    for step in (5, 6):
        write_rollouts(run, step, [(record([PARIS]), 1.0)])
    loaded: list[str] = []

    class Engine(TransformersEngine):
        def __init__(self, path: str, *rest: Any) -> None:
            loaded.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(worth, "engine_class", lambda name: {"transformers": Engine}[name])
    words = ["--rollouts", str(run / "rollouts"), "--checkpoint", str(run / "model")]
    assert main([str(run), "--device=cpu", "--dtype=float32", *words, "--steps", "5", "6"]) == 0
    assert len(loaded) == 1
    assert sorted(p.name for p in (run / "credit").iterdir())[-2:] == [
        "step_00000005.jsonl", "step_00000006.jsonl"
    ]  # fmt: skip


def test_answers_are_sampled_and_scored(folder: Path) -> None:
    """They use the run's reward and limits; this policy never answers, so the worth is 0."""
    words = ["--samples=2", "--limit=1", "--checkpoint", str(folder / "model"), "--device=cpu"]
    assert main([str(folder), "--dtype=float32", *words]) == 0
    assert [(row["line"], row["worth"]["reward"]) for row in lines(folder)] == [(0, 0.0)] * 2


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["RUN/model"], "RUN: got .*expected a run that recorded its trajectories"),
        (["RUN", "--steps", "3", "4"], "--steps: got 3, expected recorded steps of .*: 4 to 4"),
        (["RUN/rollouts"], "--checkpoint: got none, expected weights, since .* has no config.yaml"),
        (["RUN", "--checkpoint", "RUN/nothing"], "--model .*/nothing: got"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], pattern: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends before any weights are loaded."""
    assert main([word.replace("RUN", str(folder), 1) for word in words]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    assert re.search(pattern, message)
