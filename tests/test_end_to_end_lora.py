"""The complete system with adapters: Ray, FSDP ranks, vLLM serving LoRA, the retriever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.test_end_to_end import metrics, start_world, train
from verl.checkpoint.exporting import export

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

OPTIONS = (
    "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.model.lora_rank=6", "actor_rollout_ref.model.lora_alpha=12",
    "critic.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=1e-2", "critic.optim.lr=1e-2",
    # A random model gets no reward: the critic is trained by costs, the policy by entropy.
    "reward_model.name=em_cost", "reward_model.invalid_format=0.5",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
)  # fmt: skip


@dataclass
class Run:
    """A finished run, its inputs and metrics."""

    world: dict[str, str]
    out: Path
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["adapter", "merged"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run PPO on two ranks, policy and critic as adapters, two steps with a checkpoint each.

    The engine computes with the adapter, or receives the merged weights.
    """
    merges = f"actor_rollout_ref.rollout.merge_adapter={request.param == 'merged'}"
    out = tmp_path_factory.mktemp("lora")
    with start_world(tmp_path_factory.mktemp("world")) as world:
        rows = train(world, out, *OPTIONS, merges, "trainer.save_freq=1", "trainer.test_freq=0")
        yield Run(world, out, rows)


def test_engine_and_trainer_agree_after_every_update(run: Run) -> None:
    """Log-probs of samples with each new adapter differ by < 1e-3 between vLLM and the ranks."""
    steps = [row for row in run.rows if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 < row["actor/rollout_mismatch_max"] < 1e-3 for row in steps)
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in steps)
    assert all(row["actor/skipped_updates"] == row["critic/skipped_updates"] == 0 for row in steps)
    # Two updates per step: in the second, the policy differs from the base, its reference.
    assert all(row["actor/kl_loss"] > 1e-3 for row in steps)


def test_the_end_of_a_run_is_merged_model_and_adapter(run: Run, tmp_path: Path) -> None:
    """`model/` and the last checkpoint's export give the log-probs of `adapter/` on the base."""
    dtype, ids = torch.float32, torch.arange(5, 90)[None]
    base = AutoModelForCausalLM.from_pretrained(run.world["model"], dtype=dtype)
    exported = export(run.out / "global_step_2", tmp_path / "hf", dtype="float32")
    with torch.no_grad():
        plain = base(ids).logits.log_softmax(-1)
        answers = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(ids).logits.log_softmax(-1)
            for folder in (run.out / "model", exported)
        ]
        adapted = PeftModel.from_pretrained(base, run.out / "adapter")(ids).logits.log_softmax(-1)
    for answer in answers:
        torch.testing.assert_close(answer, adapted, rtol=0, atol=1e-4)
    assert (adapted - plain).abs().max() > 1e-2


def test_a_resumed_run_continues_with_the_next_step(run: Run, tmp_path: Path) -> None:
    """From step 1's adapters on the base, step 2 has the metrics of the uninterrupted run."""
    resumed = train(
        run.world, tmp_path, *OPTIONS, "trainer.save_freq=0",
        f"trainer.resume_mode={run.out / 'global_step_1'}",
    )  # fmt: skip
    assert [row["step"] for row in resumed] == [2]
    uninterrupted = metrics(run.out)[-1]
    for name in ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss", "actor/grad_norm"):
        assert resumed[0][name] == pytest.approx(uninterrupted[name], rel=1e-4, abs=1e-6), name
