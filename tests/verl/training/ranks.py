"""What the tests of the training ranks share: small models and batches, and processes of ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from example.tiny import tiny_llama
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.preflight.memory.offload import settled
from verl.types import TokenBatch

VOCAB = 97


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def save_tiny(folder: Path, seed: int = 0) -> str:
    """Write a tiny Llama with a small vocabulary; returns its path."""
    tiny_llama(VOCAB, seed=seed).save_pretrained(folder)
    return str(folder)


def tiny_config(path: str, num_ranks: int = 1, adv_estimator: str = "gae") -> Config:
    """Options of a float32 run on CPU with KL and entropy in the loss."""
    config = Config()
    config.actor_rollout_ref.model.path = path
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.critic.model.enable_gradient_checkpointing = False
    actor = config.actor_rollout_ref.actor
    actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff = True, 0.1, 0.01
    actor.optim.lr, actor.grad_clip = 1e-3, 0.5
    config.algorithm.adv_estimator = adv_estimator
    config.trainer.n_gpus_per_node = num_ranks
    config.trainer.device, config.trainer.compute_dtype = "cpu", "float32"
    return settled(config)


def make_batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    """A random mini-batch with every column that updates read; prompts are two tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(total, generator=generator) < 0.6
    for start in offsets[:-1].tolist():
        mask[start : start + 2] = False

    def column(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(total, generator=generator)

    return TokenBatch(
        offsets,
        {
            "input_ids": torch.randint(0, VOCAB, (total,), generator=generator),
            "policy_mask": mask,
            "old_log_probs": -4.5 + column(0.3),
            "ref_log_probs": -4.5 + column(0.3),
            "rollout_log_probs": -4.5 + column(0.3),
            "advantages": column(),
            "values": column(0.2),
            "returns": column(),
            "loss_weights": loss_weights(mask, offsets, "token-mean"),
        },
        columns={"group": [f"g{i}" for i in range(len(lengths))]},
    )


def run_ranks(num_ranks: int, body: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Run `body(rank, num_ranks, port, *arguments)` in a process per rank; returns their answers.

    `body` must be importable by name from a module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    mp.spawn(_run, args=(body, num_ranks, port, str(folder), arguments), nprocs=num_ranks)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(num_ranks)]


def _run(
    rank: int,
    body: Callable[..., Any],
    num_ranks: int,
    port: int,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.save(body(rank, num_ranks, port, *arguments), Path(folder) / f"{rank}.pt")
