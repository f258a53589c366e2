"""What a rank does in tests of a critic with ranks of its own; importable by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.verl.training.rank_bodies import LENGTHS, shard_of
from tests.verl.training.ranks import tiny_config
from verl.config import Config
from verl.training.worker import CriticWorker, TrainerWorker, TrainingRank


def config_of(model: str, num_critics: int, lora_rank: int) -> Config:
    """PPO on one rank, with a critic beside the actor (0) or on ranks of its own."""
    config = tiny_config(model, 1)
    config.critic.n_gpus_per_node = num_critics or None
    for section in (config.actor_rollout_ref.model, config.critic.model):
        section.lora_rank = lora_rank
    return config


def run(
    rank: int, size: int, port: int, critic_port: int, model: str, num_critics: int,
    start: str | None, out: str, lora_rank: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Updates of both, from a start or a checkpoint, with a checkpoint between them.

    Ranks of the actor and of the critic follow each other in one process: neither waits for the
    other.
    """
    answers: dict[str, Any] = {"actor": [], "critic": []}
    config = config_of(model, num_critics, lora_rank)
    kinds: list[tuple[type[TrainingRank], int, int]] = [(TrainerWorker, 1, port)]
    if num_critics:
        kinds.append((CriticWorker, num_critics, critic_port))
    for kind, num_ranks, meeting in kinds:
        if rank >= num_ranks:
            continue
        worker: Any = kind(config, rank, num_ranks, "127.0.0.1", meeting, 10)
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
