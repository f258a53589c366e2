"""The short API: conversion of its arguments to options, and a real run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from searchr1.search_backend import DenseRetriever
from searchr1.trainer import SearchR1Trainer
from transformers import LlamaConfig

from example.tiny import tiny_model
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.rewards import RewardInput, RewardScores, build_reward
from search_r1.trainer import Trainer
from tests.vllm_servers import Served
from verl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAYS = {"correct_answer": 10.0, "search_penalty": -0.1, "invalid_format": -5.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the example corpus by the `hash` encoder, questions, and a model's config."""
    folder = tmp_path_factory.mktemp("world")
    lines = (ROOT / "example" / "corpus.jsonl").read_text(encoding="utf-8").splitlines(True)[:50]
    (folder / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    build_index(BuildConfig("wiki", str(folder / "corpus.jsonl"), str(folder / "index"), "hash"))
    rows = [{"question": f"where is {i}", "answer": "here"} for i in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    LlamaConfig(max_position_embeddings=8192).save_pretrained(folder / "config")
    return folder


def trainer(world: Path, **more: Any) -> SearchR1Trainer:
    """Build a trainer with default arguments."""
    backend = DenseRetriever(world / "index", "hash", top_k=2, chunk_size=100)
    arguments = {"model_name": world / "config", "search_backend": backend, "devices": 1, **more}
    return SearchR1Trainer(**arguments)


@pytest.mark.parametrize(
    ("name", "estimator", "n_agent"),
    [("ppo", "gae", 1), ("GRPO", "grpo", 5), ("reinforce",) * 2 + (1,)],
)
def test_arguments_become_options(name: str, estimator: str, n_agent: int, world: Path) -> None:
    """Arguments set their options; the others come from the preset."""
    config = trainer(world, rl_algorithm=name, reward_config=PAYS, max_search_turns=4).config
    assert config.algorithm.adv_estimator == estimator
    assert config.actor_rollout_ref.rollout.n_agent == n_agent
    assert (config.max_turns, config.retriever.topk) == (4, 2)
    assert config.reward_model.name == "em_cost"
    assert config.data.max_obs_length == 2 * (100 + 32)
    turn = config.data.max_obs_length + config.data.max_response_length
    assert config.data.max_prompt_length == config.data.max_start_length + 4 * turn
    assert config.trainer.default_local_dir == f"runs/searchr1/{name.lower()}-config"


def test_overrides_win(world: Path) -> None:
    """Overrides take precedence over the options set by arguments."""
    words = ["data.max_start_length=128", "data.max_prompt_length=300"]
    config = trainer(world, max_search_turns=1, overrides=words).config
    assert (config.data.max_prompt_length, config.data.max_obs_length) == (300, 264)


def test_a_budget_beyond_the_model_is_its_context(world: Path) -> None:
    """The prompt budget is limited to the model's context."""
    config = trainer(world, max_search_turns=100).config
    assert config.data.max_model_len == 8192


def dialogue(answer: str, num_searches: int, num_invalid: int) -> RewardInput:
    """Build a dialogue that ends with an answer."""
    texts = [f"<answer>{answer}</answer>"]
    return RewardInput(texts, [("policy", texts[0])], ["here"], "", num_searches, num_invalid)


def test_signs_mean_what_is_written(world: Path) -> None:
    """The score is the sum of the signed amounts."""
    options = trainer(world, reward_config=PAYS).config.reward_model
    rule = build_reward(options.name, RewardScores(**options.scores))
    assert rule(dialogue("here", 3, 1)).score == pytest.approx(10 - 0.1 * 3 - 5)
    assert rule(dialogue("there", 3, 0)).score == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_config": {"search_penalty": 0.1}}, "got 0.1, expected 0 or less.*=-0.1"),
        ({"reward_config": {"invalid_format": 5}}, "got 5, expected 0 or less.*=-5"),
        ({"reward_config": {"correct_answer": -10.0}}, "got -10.0, expected more than 0.*=10.0"),
        ({"reward_config": {"correct_answer": float("nan")}}, "got nan"),
        ({"reward_config": {"correct": 1.0}}, "got 'correct', expected one of correct_answer"),
        ({"rl_algorithm": "dpo"}, "rl_algorithm: got 'dpo', expected one of ppo, grpo, reinforce"),
        ({"devices": "tpu"}, "devices: got 'tpu'"),
        ({"devices": []}, r"devices: got \[\]"),
        ({"devices": True}, "devices: got True"),
        ({"max_search_turns": -1}, "max_turns: got -1"),
        ({"search_backend": 7}, None),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: dict[str, Any], message: str | None, world: Path, tmp_path: Path
) -> None:
    """Invalid arguments are refused before anything starts."""
    if message is None:
        late = trainer(world, output_dir=tmp_path, **arguments)
        with pytest.raises(ConfigError, match=r"retriever\.url: got 7"):
            late.train(world / "train.jsonl", 1, 2)
        return
    with pytest.raises(ConfigError, match=message):
        trainer(world, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"index_path": "no.index"}, "index_path: got .*no.index.*search-r1 index"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"chunk_size": -1}, "chunk_size: got -1"),
        ({"chunk_size": 0}, "chunk_size: got 0"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(
    arguments: dict[str, Any], message: str, world: Path
) -> None:
    """Invalid arguments of a backend are refused before its server is started."""
    with pytest.raises(ConfigError, match=message):
        DenseRetriever(**{"index_path": world / "index", "embedding_model": "hash", **arguments})


def test_devices_are_ranks_and_servers_engines(world: Path) -> None:
    """`devices` sets the number of ranks, and `vllm_server` the addresses of `rollout.url`."""
    assert trainer(world, devices=[0, 1]).config.trainer.n_gpus_per_node == 2
    assert trainer(world, devices="cuda:3").config.trainer.n_gpus_per_node == 1
    assert trainer(world, devices="cpu").config.trainer.device == "cpu"
    assert not trainer(world).config.placement.servers
    for servers in ("http://a:8001", ("http://a:8001", "http://b:8001")):
        config = trainer(world, vllm_server=servers).config
        assert config.placement.servers == ((servers,) if isinstance(servers, str) else servers)


def test_questions_become_rows(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions become rows with the paper's prompt; steps and batch size are set."""
    seen: list[Trainer] = []
    monkeypatch.setattr(Trainer, "train", lambda self: seen.append(self))
    trainer(world, output_dir=tmp_path).train(world / "train.jsonl", 7, 2)
    config = seen[0].config
    rows = pd.read_parquet(config.data.train_files)
    assert list(rows["question"])[:2] == ["where is 0?", "where is 1?"]
    assert "<search>" in rows["prompt"][0][0]["content"]
    assert (config.trainer.total_training_steps, config.data.train_batch_size) == (7, 2)
    assert not config.trainer.val_before_train and config.trainer.test_freq == 0


PROGRAM = """
from searchr1.search_backend import DenseRetriever
from searchr1.trainer import SearchR1Trainer

retriever = DenseRetriever(
    index_path="index",
    embedding_model="hash",
    top_k=1,
    chunk_size=32,
)
trainer = SearchR1Trainer(
    model_name="model",
    search_backend=retriever,
    rl_algorithm="grpo",
    reward_config={
        "correct_answer": 10.0,
        "search_penalty": -0.1,
        "invalid_format": -5.0,
    },
    max_search_turns=1,
    devices=[0],
    vllm_server=SERVER,
    overrides=SMALL,
)
history = trainer.train(train_data="train.jsonl", num_iterations=2, batch_size=2)
print([row["step"] for row in history.steps], history.model)
"""
SMALL = [
    "data.max_start_length=320", "data.max_prompt_length=448", "data.max_response_length=12",
    "actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", "trainer.compute_dtype=float32",
    "trainer.logger=[jsonl]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.vllm_cpu
def test_the_code_as_printed_trains(world: Path) -> None:
    """A real run with dense retrieval, ranks and a vLLM server trains a model from questions."""
    tiny_model(world / "model")
    paths = [str(ROOT), str(ROOT / "search_r1" / "compat"), os.environ.get("PYTHONPATH", "")]
    server = Served(world / "model", world / "server.log", 460).start()
    try:
        server.wait()
        (world / "program.py").write_text(f"SMALL, SERVER = {SMALL!r}, {server.url!r}\n{PROGRAM}")
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=world, capture_output=True, text=True, timeout=590,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
    finally:
        server.kill()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.endswith("[1, 2] runs/searchr1/grpo-model/model\n"), done.stdout
    run = world / "runs" / "searchr1" / "grpo-model"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["env/searches"] >= 0 and row["critic/score/mean"] <= 0 for row in rows)
