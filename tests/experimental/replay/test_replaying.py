"""Replays from a run's folder: its options, checkpoints and trajectories."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from example.tiny import tiny_llama
from search_r1.agent.generation import build_dialogue
from search_r1.experimental.replay import command
from search_r1.experimental.replay.weights import find_weights
from tests.checkpoints import writing
from tests.experimental.replay.scripted import record
from tests.runs.written import TOKENIZER, byte_tokenizer
from verl.checkpoint import folders
from verl.config import Config, cli
from verl.data.trajectories import prepare_folder, write_step
from verl.ext.engines.transformers import TransformersEngine
from verl.rewards.interface import Reward
from verl.types import Prompt, Sampling, start_trajectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one step of four trajectories, and no model."""
    rollouts = tmp_path / "rollouts"
    config = Config()
    config.data.train_files = config.data.val_files = ["none.parquet"]
    config.actor_rollout_ref.model.path = str(tmp_path / "no-model")
    config.trainer.device, config.trainer.rollout_data_dir = "cpu", str(rollouts)
    cli.write_resolved(config, tmp_path / "run")
    prepare_folder(rollouts, TOKENIZER)
    write_step(rollouts, 3, [record(seed) for seed in range(4)], [Reward(0.0)] * 4)
    return tmp_path / "run"


def test_the_checkpoint_of_a_version_is_found(tmp_path: Path) -> None:
    """Version 1 is the model at the start; a checkpoint's version is recorded, or its step + 1."""
    config = Config()
    config.actor_rollout_ref.model.path = "base"
    for step, version in ((2, None), (5, 9)):
        with writing(tmp_path, step) as folder:
            folders.write_state(folder, {"step": step, "version": version, "kl_coef": 0.0,
                                         "sampler": {}})  # fmt: skip
    steps = {v: str(folders.step_folder(tmp_path, step)) for v, step in ((3, 2), (9, 5))}
    assert find_weights(tmp_path, config) == {1: "base", **steps}


@pytest.mark.parametrize(("words", "problem"), [
    (["--trajectory=3"], "no-model: got no such folder"),
    (["--trajectory=4"], "--trajectory: got 4, expected a step in"),
    (["--trajectory=3:4"], "--trajectory: got 3:4, expected a line below 4"),
    (["--trajectory=x"], "--trajectory: got x, expected STEP:LINE"),
    (["--trajectory=3:"], "--trajectory: got 3:, expected STEP:LINE"),
    (["--trajectory=3", "--query=q"], "--trajectory: got 4 trajectories, expected one"),
    (["--trajectory=3:0", "--query=q", "--text=t"], "--query: got --text as well"),
    (["--trajectory=3:0", "--documents=none.json"], "--documents: got none.json"),
    (["--trajectory=3:0", "--turn=0"], "--turn: got 0, expected 1 or more"),
    (["--trajectory=3:0", "--rollouts=none"], "expected a step in none"),
])  # fmt: skip
def test_a_mistake_is_one_line_before_anything_is_loaded(
    run: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and the message says what was got, what was expected, and the fix."""
    try:
        status = command.main([str(run), *words])
    except SystemExit as ended:
        status = int(str(ended.code))
    message = capsys.readouterr().err
    assert status == 2 and problem in message and message.count("\n") == 1 and "fix: " in message


@pytest.mark.parametrize("text", ["[", "{}", "3", "[3]", '[{"title": "x"}]', '[[{"text": 1}], 2]'])
def test_documents_of_another_form_are_refused(
    run: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other content of the file gives the same error."""
    path = tmp_path / "documents.json"
    path.write_text(text)
    assert command.main([str(run), "--trajectory=3:0", f"--documents={path}"]) == 2
    assert 'expected a list of {"title"' in capsys.readouterr().err


def test_a_folder_without_a_known_configuration_is_refused(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without options, and one with options of another release."""
    assert command.main([str(tmp_path / "none"), "--trajectory=1"]) == 2
    assert "expected a run's trainer.default_local_dir" in capsys.readouterr().err
    with (run / "config.yaml").open("a") as file:
        file.write("unheard_of: 3\n")
    assert command.main([str(run), "--trajectory=3:0"]) == 2
    assert "unheard_of" in capsys.readouterr().err


def small_model(folder: Path) -> str:
    """Save a small model with one token per byte, and return its path."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    tiny_llama(258, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run and replay compute with one thread, since they share a process here."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_command_replays_a_recorded_step_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It uses the model that the run started from; then a text is edited, with gradients."""
    config, rollouts = Config(), tmp_path / "rollouts"
    config.data.train_files = config.data.val_files = ["none.parquet"]
    config.data.max_response_length, config.max_turns, config.retriever.url = 50, 1, "empty"
    config.actor_rollout_ref.model.path = small_model(tmp_path / "model")
    config.actor_rollout_ref.rollout.name, config.algorithm.adv_estimator = "transformers", "grpo"
    config.trainer.device, config.trainer.compute_dtype = "cpu", "float32"
    config.trainer.deterministic, config.template = True, "short"
    config.trainer.rollout_data_dir = str(rollouts)
    cli.write_resolved(config, tmp_path / "run")
    agent, engine = build_dialogue(config), TransformersEngine.from_config(config, 0)
    asyncio.run(engine.start())
    ids = agent.tokenizer.encode("Who?", add_special_tokens=False)
    prompt = Prompt("f#0", tuple(ids), "nq", ("Oslo",))
    starts = [start_trajectory(prompt, group="1/0", sample=i, seed=i) for i in range(3)]
    done = [asyncio.run(agent.run(start, engine, Sampling(50))) for start in starts]
    versioned = [[replace(s, weight_version=1) for s in one.segments] for one in done]
    done = [replace(one, segments=own) for one, own in zip(done, versioned, strict=True)]
    prepare_folder(rollouts, agent.tokenizer)
    write_step(rollouts, 1, done, [Reward(0.0)] * 3)

    assert command.main([str(tmp_path / "run"), "--trajectory=1"]) == 0
    message = capsys.readouterr().out
    assert message.count("Bit-identical to the record: all") == 3
    assert message.endswith("3 of 3 equal the record bit for bit\n")
    words = ["--trajectory=1:1", "--text=<answer> Oslo </answer>", "--gradient", "--json"]
    assert command.main([str(tmp_path / "run"), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["row"]["status"] == "answered" and found["score"]["replayed"] == 1, found["row"]
    assert found["advantage"]["replayed"] > 0 == found["gradient"]["norm_recorded"]
    assert found["gradient"]["norm_replayed"] > 0 and found["gradient"]["cosine"] is None
