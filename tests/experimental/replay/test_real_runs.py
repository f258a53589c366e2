"""Real runs replayed by the command.

Fifty trajectories are repeated bit for bit; an edit equals a new dialogue with the same prefix.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.generation import build_dialogue
from search_r1.experimental.replay.replaying import read_run_config
from search_r1.inference.model import model_folder
from tests.test_end_to_end import ROOT, train
from tests.test_retriever_failures import COUNTRIES, retriever, searching_world
from verl.agent.dialogue import derived_seed
from verl.agent.interface import Turn
from verl.data.trajectories import RecordedTrajectory, read_step
from verl.ext.engines.transformers import TransformersEngine
from verl.types import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

OPTIONS = (
    "algorithm.adv_estimator=grpo", "data.train_batch_size=5",
    "actor_rollout_ref.rollout.n_agent=5", "actor_rollout_ref.actor.ppo_mini_batch_size=25",
    "actor_rollout_ref.actor.entropy_coeff=-0.1", "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=0",
    "trainer.val_before_train=false", "trainer.n_gpus_per_node=1", "max_turns=2",
    "data.max_response_length=24",
    "trainer.deterministic=true", "data.max_prompt_length=512", "data.max_obs_length=96",
)  # fmt: skip
"""Two steps of 25 trajectories each, the second sampled with trained weights."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that searches; its retriever ends before anything is replayed."""
    return searching_world(tmp_path_factory.mktemp("world"), answer="b")


def recorded(world: dict[str, str], out: Path, *options: str) -> Path:
    """Train a run that records its trajectories, and return its folder."""
    with retriever(Path(world["folder"])) as server:
        train({**world, "url": server.url}, out, *OPTIONS, *options,
              f"trainer.rollout_data_dir={out}/rollouts")  # fmt: skip
    return out


def replay(run: Path, *words: str) -> list[dict[str, Any]]:
    """Return the command's JSON output."""
    command = [
        sys.executable,
        "-m",
        "search_r1.experimental.replay.command",
        str(run),
        *words,
        "--json",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_fifty_trajectories_equal_the_record_bit_for_bit(
    world: dict[str, str], tmp_path: Path, engine: str
) -> None:
    """A deterministic run in float32 has the same ids and log-probs."""
    run = recorded(world, tmp_path / "run", f"actor_rollout_ref.rollout.name={engine}")
    reports = replay(run, "--trajectory", "1", "2")
    assert len(reports) == 50
    assert [report["verdict"] for report in reports if not report["identical"]] == []
    assert all(report["num_tokens"] > 0 for report in reports)
    assert {s["weight_version"] for report in reports for s in report["row"]["segments"]
            if s["origin"] == "policy"} == {1, 2}  # fmt: skip
    note = "The advantage is computed from the scores, without the KL in the reward."
    assert all(report["notes"] == [note] for report in reports)
    assert all(r["score"]["recorded"] == r["score"]["replayed"] for r in reports)
    steps = {step: read_step(run / "rollouts", step) for step in (1, 2)}
    assert any(row.trajectory.stats["searches"] for row in steps[2])


def test_an_edit_and_the_wrong_weights(world: dict[str, str], tmp_path: Path) -> None:
    """An edited replay equals a new dialogue; a replay without its weights' checkpoint says so."""
    run = recorded(world, tmp_path / "run", "actor_rollout_ref.rollout.name=transformers")
    line = next(i for i, row in enumerate(read_step(run / "rollouts", 2))
                if row.trajectory.stats["searches"] == 3)  # fmt: skip
    name = f"2:{line}"
    [plain] = replay(run, "--trajectory", name)
    first = plain["row"]["segments"][1]["text"]
    query = next(country for country in COUNTRIES if country in first)
    other = next(country for country in COUNTRIES if country != query)
    [edited] = replay(run, "--trajectory", name, "--query", other)
    segments = edited["row"]["segments"]
    assert segments[1]["text"] == first.replace(query, other) and edited["differs_at"][0] == 1
    assert segments[2]["origin"] == "observation" and other in segments[2]["text"]
    row, before = read_step(run / "rollouts", 2)[line], [i for s in segments[:3] for i in s["ids"]]
    assert [s["ids"] for s in segments[3:]] == continue_dialogue(run, row, before)

    [answered] = replay(run, "--trajectory", name, "--text", "<answer> b </answer>", "--gradient")
    assert answered["score"] == {"recorded": 0.0, "replayed": 1.0}
    assert answered["advantage"]["recorded"] == 0 < answered["advantage"]["replayed"]
    assert answered["gradient"]["norm_replayed"] == answered["gradient"]["norm_of_change"] > 0

    (run / "global_step_1").rename(tmp_path / "elsewhere")
    [wrong] = replay(run, "--trajectory", name)
    assert not wrong["identical"] and "no checkpoint of weights 2" in wrong["notes"][0]


def continue_dialogue(run: Path, row: RecordedTrajectory, ids: list[int]) -> list[list[int]]:
    """Return the ids of the turns and responses that a new engine of step 1 gives after `ids`."""
    config, parts = read_run_config(run), []
    seed = row.trajectory.seed or 0
    with model_folder(str(run / "global_step_1"), "float32") as folder:
        config.actor_rollout_ref.model.path = str(folder)
        agent, engine = build_dialogue(config), TransformersEngine(str(folder), "cpu", "float32",
                                                                   caches=False)  # fmt: skip
        asyncio.run(engine.start())
        for turn in (1, 2):
            request = Sampling(24, stop=agent.format.stop, seed=derived_seed(seed, turn))
            completion = asyncio.run(engine.generate(ids, request))
            parts.append(list(completion.ids))
            ids = [*ids, *completion.ids]
            if turn == 1:
                calls = agent.format.parse(completion).calls
                result = recorded_result(run, str(calls[0].arguments)) if calls else None
                text = result or agent.format.respond(Turn(), None, ())
                parts.append(agent.tokenizer.encode(text, add_special_tokens=False))
                ids += parts[-1]
    return parts


def recorded_result(run: Path, query: str) -> str:
    """Return the recorded text of a query's result."""
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            segments = json.loads(line)["segments"]
            for turn, response in itertools.pairwise(segments):
                if turn["text"].endswith(f"<search>{query}</search>"):
                    return str(response["text"])
    raise AssertionError(f"no recorded search for {query}")
