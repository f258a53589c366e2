"""Functions that ranks run in tests of a critic with its own ranks; importable by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.verl.training.rank_bodies import LENGTHS, shard_of
from tests.verl.training.ranks import tiny_config
from verl.config import Config
from verl.training.worker import TrainerWorker


def make_config(model: str, num_critics: int, lora_rank: int) -> Config:
    """Return PPO options for one rank, with the critic on it (0) or on `num_critics` own ranks."""
    config = tiny_config(model, 1)
    config.critic.n_gpus_per_node = num_critics or None
    for section in (config.actor_rollout_ref.model, config.critic.model):
        section.lora_rank = lora_rank
    return config


def run(
    rank: int, size: int, port: int, critic_port: int, model: str, num_critics: int,
    start: str | None, out: str, lora_rank: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Update actor and critic, save a checkpoint, and update again; or resume from one (`start`).

    One process runs the rank of the actor first and then that of the critic: neither waits for the
    other.
    """
    answers: dict[str, Any] = {"actor": [], "critic": []}
    config = make_config(model, num_critics, lora_rank)
    ports = {"rank": port, "critic rank": critic_port}
    for group, plan in config.placement.groups.items():
        num_ranks = plan.num_ranks
        if rank >= num_ranks:
            continue
        address = "127.0.0.1", ports[group]
        worker: Any = TrainerWorker(config, rank, num_ranks, *address, 10, group=group)
        if start is not None:
            worker.load_checkpoint(start)

        def learn(worker: Any, num_ranks: int, seed: int) -> None:
            for name in worker.models:
                shard = shard_of(rank, num_ranks, LENGTHS, seed)
                answers[name].append(getattr(worker, name).update(shard))

        if start is None:
            learn(worker, num_ranks, 0)
            answers["problem"] = answers.get("problem", "") + worker.save_checkpoint(out)
        learn(worker, num_ranks, 1)
        if "critic" in worker.models:
            answers["values"] = worker.critic.values(shard_of(rank, num_ranks, LENGTHS, 2))
        if "actor" in worker.models:
            worker.save_policy(Path(out) / "weights", "float32")
        worker.shutdown()
    return answers
