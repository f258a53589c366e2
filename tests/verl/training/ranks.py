"""Shared by tests of training ranks: small models and batches, and a process per rank."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from example.tiny import tiny_llama
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.ports import free_port
from verl.preflight.memory.check import fill_undecided
from verl.types import TokenBatch

VOCAB = 97
MAX_RANKS = 2
"""Most ranks in tests that are not slow."""


def save_tiny(folder: Path, seed: int = 0) -> str:
    """Write a tiny Llama with a small vocabulary; returns its path."""
    tiny_llama(VOCAB, seed=seed).save_pretrained(folder)
    return str(folder)


def tiny_config(path: str, num_ranks: int = 1, adv_estimator: str = "gae") -> Config:
    """Return the options of a float32 run on CPU with KL and entropy in the loss."""
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
    return fill_undecided(config)


def make_batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    """Make a random mini-batch with every column that updates read; prompts have two tokens."""
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


def make_groups(groups: list[tuple[int, list[int]]], seed: int = 0) -> TokenBatch:
    """Make a batch as `make_batch`, of groups given by the lengths of prompt and responses."""
    members = [(f"g{i}", p, r) for i, (p, responses) in enumerate(groups) for r in responses]
    batch = make_batch([p + r for _, p, r in members], seed)
    ids, mask = batch.tokens["input_ids"], batch.tokens["policy_mask"]
    batch.tokens["response_mask"] = torch.ones_like(mask)
    prompts: dict[str, Tensor] = {}
    for start, (group, prompt, _) in zip(batch.offsets.tolist(), members, strict=False):
        own = slice(start, start + prompt)
        ids[own] = prompts.setdefault(group, ids[own].clone())
        batch.tokens["response_mask"][own] = mask[own] = False
        mask[start + prompt] = True  # the policy's first token follows the prompt
    batch.tokens["loss_weights"] = loss_weights(mask, batch.offsets, "token-mean")
    batch.columns["group"] = [group for group, _, _ in members]
    return batch


_world: list[ProcessPoolExecutor] = []
"""One process per rank, kept for the session: importing torch and our code takes seconds.

A process has the same rank in every test, because DTensor's caches last as long as the process and
must not be used for another rank's shards.
"""


def run_ranks(num_ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `body(rank, num_ranks, port, *arguments)` in a process per rank; return the results.

    `body` must be importable by name from a module, and destroy its process group at the end.
    """
    spawn = multiprocessing.get_context("spawn")
    _world.extend(
        ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,))
        for _ in range(len(_world), max(num_ranks, MAX_RANKS))
    )
    port = free_port()
    calls = [
        pool.submit(_pickled, body, rank, num_ranks, port, *arguments)
        for rank, pool in enumerate(_world[:num_ranks])
    ]
    done, waiting = wait(calls, timeout=300, return_when=FIRST_EXCEPTION)
    if waiting or any(call.exception() for call in done):
        for pool in _world:
            for process in list(pool._processes.values()):
                process.kill()  # the other ranks wait for the failed one
        _world.clear()
    return [pickle.loads(call.result()) for call in calls if call not in waiting]


def _pickled(body: Callable[..., Any], *arguments: Any) -> bytes:
    """Pickle the result of `body`: torch would send tensors as files that end with the process."""
    return pickle.dumps(body(*arguments))
