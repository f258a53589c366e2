"""Functions that ranks with adapters run in tests with a process each; importable by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.verl.training.rank_bodies import LENGTHS, next_metrics, shard_of
from tests.verl.training.ranks import tiny_config
from verl.checkpoint import folders
from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.training.worker import TrainerWorker

RANK, ALPHA = 4, 6.0


def lora_config(model: str, num_ranks: int) -> Config:
    """Return PPO options with KL in the loss; policy and critic are adapters of one base.

    With two ranks, activations are recomputed selectively.
    """
    config = tiny_config(model, num_ranks)
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 20
    config.actor_rollout_ref.actor.optim.lr = config.critic.optim.lr = 1e-2
    for options in (config.actor_rollout_ref.model, config.critic.model):
        options.lora_rank, options.lora_alpha = RANK, ALPHA
        options.enable_gradient_checkpointing = SELECTIVE if num_ranks > 1 else False
    config.critic.model.lora_rank = 2
    return config


def all_parameters(worker: TrainerWorker) -> dict[str, Tensor]:
    """Gather all parameters: the base and both adapters."""
    return {name: x.clone() for name, x in worker.actor.model.full_parameters()}


def train(rank: int, size: int, port: int, model: str, out: str) -> dict[str, Any]:
    """Run updates of actor and critic, one without data for a rank; then all passes and files."""
    worker = TrainerWorker(lora_config(model, size), rank, size, "127.0.0.1", port, 10)
    first = shard_of(rank, size, LENGTHS, 0)
    answers: dict[str, Any] = {"before": worker.actor.log_probs(first), "metrics": []}
    stages = [all_parameters(worker)]
    for seed, lengths in enumerate((LENGTHS, [12], [8, 8, 20])):
        answers["metrics"].append(worker.critic.update(shard_of(rank, size, lengths, seed)))
        stages.append(all_parameters(worker))
        answers["metrics"].append(worker.actor.update(shard_of(rank, size, lengths, seed)))
        stages.append(all_parameters(worker))
    answers["stages"] = stages
    answers["values"] = worker.critic.values(first)
    answers["ref_log_probs"] = worker.reference.log_probs(first)
    answers["log_probs"] = worker.actor.log_probs(first)
    worker.save_policy(Path(out) / "merged", "float32")
    worker.roles.save_adapter(f"{out}/adapter")
    # The driver renames the folder when all ranks are done.
    worker.save_checkpoint(Path(out) / "global_step_3.tmp")
    answers["next"] = next_metrics(worker, rank, size)
    worker.shutdown()
    return answers


def resume(rank: int, size: int, port: int, model: str, out: str) -> dict[str, Any]:
    """Resume from the checkpoint of `train` in a new run with other initial adapters."""
    config = lora_config(model, size)
    config.trainer.seed = 5
    worker = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    checkpoint = folders.latest(Path(out))
    assert checkpoint is not None
    worker.load_checkpoint(checkpoint)
    answers = {"stages": [all_parameters(worker)], "next": next_metrics(worker, rank, size)}
    worker.shutdown()
    return answers
