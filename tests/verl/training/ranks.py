"""Shared by tests of training ranks: small models and batches, and a process per rank."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from example.tiny import tiny_llama
from tests.core.batches import VOCAB
from verl.config import Config
from verl.ports import free_port
from verl.preflight.undecided import fill_undecided

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
