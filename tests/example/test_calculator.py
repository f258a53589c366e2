"""A user-defined tool: a calculator in one file, used in dialogues and in training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from example.tools.calculator import Calculator
from search_r1.agent.generation import build_dialogue, build_environment
from search_r1.scoring import build_reward_manager
from tests.bad_models import whole_model
from tests.fakes import cut_at_stop, texts
from tests.memory_tracker import MemoryTracker
from tests.verl.rollout.instant import InstantRollouts
from tests.verl.trainer.local_run import LocalRanks
from tests.verl.trainer.test_ranks import ranks_of
from verl.agent.dialogue import DialogueAgent
from verl.batch import TokenBatch
from verl.config import Config, cli
from verl.core_algos.kl import FixedKLController
from verl.monitor.tracking import Tracking
from verl.ports import free_port
from verl.preflight.undecided import fill_undecided
from verl.trainer.build import Inputs, Parts
from verl.trainer.ranks import TrainerRanks
from verl.training.worker import TrainerWorker
from verl.types import Completion, Origin, Prompt, Sampling, Trajectory

FILE = Path(__file__).resolve().parents[2] / "example" / "tools" / "calculator.py"
CALLS = ["<calculator> 6 * 7 </calculator>", "<answer> 42 </answer>"]
GUESS = ["<answer> 41 </answer>"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(2 + 3) * 4", "20"), ("1 / 3", "0.3333333333"), ("-7 // 2", "-4"),
        ("1 / 0", "Error: division by zero"), ("2 +", "Error: invalid syntax"),
        ("__import__('os')", "Error: got \"__import__('os')\", expected numbers and + - * / // %"),
        ("9 ** 9 ** 9", "Error: got '9 ** 9 ** 9', expected numbers and + - * / // %"),
        ("1+" * 150 + "1", "Error: over 200 characters"),
    ],
)  # fmt: skip
def test_only_arithmetic_is_computed(expression: str, expected: str) -> None:
    """Errors are observations; names, calls and powers are not computed."""
    [item] = asyncio.run(Calculator().call(expression)).items
    assert item.text.partition(" (<unknown>")[0] == expected


class Scripted:
    """A policy that calls the calculator in even samples and guesses in odd ones."""

    def __init__(self, agent: DialogueAgent, sample: int) -> None:
        self.tokenizer: Any = agent.tokenizer
        self.turns = iter(GUESS if sample % 2 else CALLS)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        text, reason = cut_at_stop(next(self.turns), sampling.stop)
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return Completion(ids, (-1.0,) * len(ids), text, reason)


class Replicas(InstantRollouts):
    """Rollouts that run the agent of the run in this process."""

    def __init__(self, agent: DialogueAgent) -> None:
        self.agent = agent
        self.finished: list[Trajectory] = []

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        async def run_all() -> list[Trajectory]:
            runs = (self.agent.run(s, Scripted(self.agent, s.sample), sampling) for s in starts)
            return list(await asyncio.gather(*runs))

        self.finished = asyncio.run(run_all())
        return self.finished


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return the configuration of a run with the tool, as a user would start it."""
    return fill_undecided(cli.compose([
        f"agent.tools=['{FILE}:Calculator']", "template=tools",
        "data.train_files=none.parquet", "data.val_files=none.parquet",
        "data.train_batch_size=2", "actor_rollout_ref.rollout.n_agent=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0", "trainer.save_freq=0",
        "trainer.test_freq=0", "trainer.guard.action=off", "trainer.device=cpu",
        "trainer.compute_dtype=float32", "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.model.path={whole_model(tmp_path / 'start', hidden_size=64)}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]))  # fmt: skip


@pytest.fixture
def ranks(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerRanks]:
    """Run one real training rank in this process."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), total_steps=3)
    yield ranks_of(LocalRanks(worker))
    dist.destroy_process_group()


def test_a_policy_learns_to_call_a_user_defined_tool(config: Config, ranks: TrainerRanks) -> None:
    """Three GRPO steps make calls more likely; observations are seen, but not trained on."""
    agent = build_dialogue(config)
    replicas, tracker = Replicas(agent), MemoryTracker()
    ids = tuple(agent.tokenizer.encode("What is 6 * 7? ", add_special_tokens=False))
    prompts = [Prompt(f"sums#{i}", ids, "sums", ("42",)) for i in range(2)]
    config.trainer.canary = False
    trainer = Parts(
        Inputs(config, prompts, prompts, 3, build_environment(config)), ranks, replicas,
        build_reward_manager(config), FixedKLController(0.0),
        Tracking("p", "e", [tracker], config.trainer.default_local_dir),
    ).build()  # fmt: skip
    trainer.fit()
    calls = [t for t in replicas.finished if t.sample % 2 == 0]
    assert texts(calls[0], Origin.OBSERVATION) == ["\n\n<information>42\n</information>\n\n"]
    batch = TokenBatch.from_trajectories(calls[:1])
    observed = agent.tokenizer.encode(
        "\n\n<information>42\n</information>\n\n", add_special_tokens=False
    )
    is_observed = batch.tokens["response_mask"] & ~batch.tokens["policy_mask"]
    assert batch.tokens["input_ids"][is_observed].tolist() == observed
    steps = [row for step, row in tracker.records if step > 0]
    assert len(steps) == 3
    for row in steps:
        assert (row["env/calculator_calls"], row["env/valid_calculator_calls"]) == (0.5, 0.5)
        assert row["critic/score/mean"] == 0.5 and "env/searches" not in row
    trained = Path(config.trainer.default_local_dir) / "model"
    before = likelihood(config.actor_rollout_ref.model.path, batch)
    assert likelihood(str(trained), batch) > before + 0.1
    settings = json.loads((trained / "search_r1.json").read_text())
    assert (settings["template"], settings["tools"]) == ("tools", [f"{FILE}:Calculator"])


def likelihood(model: str, batch: TokenBatch) -> float:
    """Return the mean log-prob of the policy's tokens in a batch of one sequence."""
    ids, mask = batch.tokens["input_ids"], batch.tokens["policy_mask"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return float(log_probs[mask[1:]].mean())
