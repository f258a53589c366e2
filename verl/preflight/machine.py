"""Checks of this machine: enough devices, and a results folder with room for a checkpoint."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from verl.config import Config
from verl.errors import ResourceError, UserError, explain
from verl.training.loading import weight_bytes
from verl.training.network import joins_cluster
from verl.training.roles import has_critic

CHECKPOINT_FACTOR = 3
"""Bytes of a checkpoint per byte of weights: at least fp32 weights and two Adam moments."""
MIN_FREE_BYTES = 1 << 30


def problems(config: Config) -> Iterator[UserError]:
    """Yield why this machine cannot hold the run."""
    yield from _device_problems(config)
    yield from _disk_problems(config)


def _device_problems(config: Config) -> Iterator[UserError]:
    """Check that this machine has enough devices; on a cluster Ray checks it."""
    if joins_cluster():
        return
    trainer, key, num_gpus = config.trainer, "trainer.n_gpus_per_node", torch.cuda.device_count()
    if trainer.device == "cuda" or (trainer.device == "auto" and num_gpus):
        if num_gpus < config.placement.gpus_per_node:
            separate = {"trainer.rollout_gpus": trainer.rollout_gpus,
                        "critic.n_gpus_per_node": config.critic.n_gpus_per_node}  # fmt: skip
            separate = {name: number for name, number in separate.items() if number}
            fix = f"set {key}={num_gpus}" if num_gpus else "set trainer.device=cpu, or add a GPU"
            if separate and num_gpus:
                fix = f"lower them to {num_gpus} together, or leave out {' and '.join(separate)}"
            counts = [str(trainer.n_gpus_per_node), *(f"{k}={n}" for k, n in separate.items())]
            got = f"{' and '.join(counts)} with {num_gpus} GPUs here"
            yield ResourceError(explain(key, got, "as many", fix))
        return
    num_cores = os.cpu_count() or 1
    num_ranks = sum(group.per_node for group in config.placement.groups.values())
    if num_ranks > max(2, num_cores):
        got = f"{num_ranks} ranks with no GPU and {num_cores} cores"
        expected = "a GPU each, or on CPU at most one rank per core"
        yield ResourceError(explain(key, got, expected, f"set {key}=1"))


def _disk_problems(config: Config) -> Iterator[UserError]:
    """Check that the results folder is writable and has space for one checkpoint."""
    key, target = "trainer.default_local_dir", Path(config.trainer.default_local_dir).absolute()
    existing = next(folder for folder in (target, *target.parents) if os.path.exists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        expected = "a folder that can be written"
        fix = f"set {key} to another folder"
        yield ResourceError(explain(key, f"{target} ({existing} is not writable)", expected, fix))
        return
    saves = config.trainer.save_freq != 0 and not config.trainer.val_only
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    trained = [] if policy.is_frozen else [policy.path]
    if has_critic(config) and not critic.is_frozen:
        trained.append(config.critic_path)
    # Checkpoints beside a frozen model are small, but the run ends by exporting the whole model.
    size = CHECKPOINT_FACTOR * sum(map(weight_bytes, trained)) or weight_bytes(policy.path)
    needed = max(MIN_FREE_BYTES, size) if saves else 0
    free = shutil.disk_usage(existing).free
    if free < needed:
        got = f"{free / 2**30:.1f} GiB free at {existing}"
        fix = f"free some, set {key} to another disk, or trainer.save_freq=0"
        purpose = "a checkpoint" if trained else "the model exported at the end of the run"
        expected = f"{needed / 2**30:.1f} GiB for {purpose}"
        yield ResourceError(explain(key, got, expected, fix))
