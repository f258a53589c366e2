"""The command over a recorded run: its figures against a plain forward of the same weights."""

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
from search_r1.credit import running
from search_r1.credit.command import main
from search_r1.view.run import Run
from tests.view.conftest import open_run as open_run
from tests.view.runs import PARIS, ROME, TOKENIZER, dialogue, start_run, write_rollouts
from verl.rollout.transformers_engine import TransformersEngine
from verl.types import Trajectory

OPTIONS = {"max_response_length": 3, "train_files": "a.parquet", "val_files": "b.parquet"}
QUESTION, GOLD = "What is the capital of France?", ["Paris"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step and its weights: two searches, one, none, and no answer."""
    run = start_run(tmp_path_factory.mktemp("credit") / "run", data=OPTIONS)
    model = run / "model"
    tiny_llama(256, hidden_size=32, num_layers=1).save_pretrained(model)
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER).save_pretrained(model)
    write_rollouts(run, 4, [(searched([ROME], [PARIS, ROME]), 1.0), (searched([PARIS]), 0.5),
                            (searched(), 0.0), (searched([ROME], answer=None), 0.0)])  # fmt: skip
    return run


def searched(*found: Sequence[tuple[str, str]], answer: str | None = "Paris") -> Trajectory:
    return dialogue(QUESTION, GOLD, answer, [(f"q{i}", one) for i, one in enumerate(found)])


def likelihood(folder: Path, trajectory: Trajectory) -> dict[str, float]:
    """Log-probs of the last turn and of the answer in it, token by token, from a whole forward."""
    lm: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids, turn = trajectory.ids, trajectory.segments[-1]
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0].double()
    start = len(ids) - len(turn.ids)
    by_token = [float(logits[t - 1].log_softmax(0)[ids[t]]) for t in range(start, len(ids))]
    at = turn.text.index("<answer>") + len("<answer>")  # one token a byte
    return {"turn": sum(by_token), "answer": sum(by_token[at : turn.text.index("</answer>")])}


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "credit" / "step_00000004.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_document_is_worth_what_the_answer_loses_without_it(
    folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """Left out of each search that brought it; and the page shows it beside the document."""
    assert main([str(folder), "--device=cpu", "--dtype=float32"]) == 0
    found = lines(folder)
    assert [(one["line"], one["title"]) for one in found] == [
        (0, ROME[0]), (0, PARIS[0]), (1, PARIS[0])
    ]  # fmt: skip
    whole = [searched([ROME], [PARIS, ROME])] * 2 + [searched([PARIS])]
    parts = [searched([], [PARIS]), searched([ROME], [ROME]), searched([])]
    for one, with_it, without_it in zip(found, whole, parts, strict=True):
        first, second = likelihood(folder, with_it), likelihood(folder, without_it)
        for name in ("turn", "answer"):
            assert one["with"][name] == pytest.approx(first[name], abs=1e-3)
            assert one["without"][name] == pytest.approx(second[name], abs=1e-3)
            assert one["worth"][name] == pytest.approx(first[name] - second[name], abs=2e-3)
        assert one["recorded"]["turn"] == pytest.approx(sum(with_it.segments[-1].log_probs))
        assert one["answer"] == "Paris" and one["has_answer"] is (one["title"] == PARIS[0])
    run = open_run(folder)
    calls = run.trajectory("train", 4, 0)["calls"]  # type: ignore[index]
    shown = [[document["worth"] for document in call["documents"]] for call in calls]
    assert shown == [[found[0]["worth"]], [found[1]["worth"], found[0]["worth"]]]
    dump = folder / "rollouts" / "step_00000004.jsonl"
    os.utime(dump, ns=(2**62, 2**62))
    calls = run.trajectory("train", 4, 1)["calls"]  # type: ignore[index]
    assert calls[0]["documents"][0]["worth"] is None  # the step was run again


def test_weights_are_loaded_once_for_all_steps_that_they_judge(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never two at a time: a model may need all of the memory."""
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    for step in (5, 6):
        write_rollouts(run, step, [(searched([PARIS]), 1.0)])
    loaded: list[str] = []

    class Engine(TransformersEngine):
        def __init__(self, path: str, *rest: Any) -> None:
            loaded.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(running, "TransformersEngine", Engine)
    words = ["--rollouts", str(run / "rollouts"), "--checkpoint", str(run / "model")]
    assert main([str(run), "--device=cpu", "--dtype=float32", *words, "--steps", "5", "6"]) == 0
    assert len(loaded) == 1
    assert sorted(p.name for p in (run / "credit").iterdir())[-2:] == [
        "step_00000005.jsonl", "step_00000006.jsonl"
    ]  # fmt: skip


def test_answers_are_sampled_anew_and_scored(folder: Path) -> None:
    """By the run's reward and budget; this policy knows nothing, so that nothing is worth more."""
    words = ["--samples=2", "--limit=1", "--checkpoint", str(folder / "model"), "--device=cpu"]
    assert main([str(folder), "--dtype=float32", *words]) == 0
    assert [(one["line"], one["worth"]["reward"]) for one in lines(folder)] == [(0, 0.0)] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUN/model"], "RUN: got .*expected a run that kept its trajectories"),
        (["RUN", "--steps", "3", "4"], "--steps: got 3, expected steps that .* has: 4 to 4"),
        (["RUN/rollouts"], "--checkpoint: got none, expected weights, as .* has no config.yaml"),
        (["RUN", "--checkpoint", "RUN/nothing"], "--model .*/nothing: got"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any weights are loaded."""
    assert main([word.replace("RUN", str(folder), 1) for word in words]) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    assert re.search(says, told)
