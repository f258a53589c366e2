"""Functions that ranks run in tests with a process per rank; importable by name."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from tests.core.batches import make_batch
from tests.verl.training.ranks import tiny_config
from verl.checkpoint import folders
from verl.ext.transports.ipc import IpcSender, receive
from verl.packing import split_by_work
from verl.training.worker import TrainerWorker

LENGTHS = [14, 9, 17, 6, 11]


def shard_of(rank: int, size: int, lengths: list[int], seed: int) -> Any:
    return split_by_work(make_batch(lengths, seed), size).shards[rank]


def whole_policy(folder: Path) -> dict[str, Tensor]:
    """Read the weights of all safetensors files in a folder."""
    return {k: x for path in folder.glob("*.safetensors") for k, x in load_file(path).items()}


def train(rank: int, size: int, port: int, model: str, out: str) -> dict[str, Any]:
    """Run updates of actor and critic, one without data for a rank; save; update once more."""
    config = tiny_config(model, size)
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 20
    config.critic.ppo_max_token_len_per_gpu = 20
    config.critic.model.fsdp_config.reshard_each = size == 1  # two ranks reduce once per update
    worker = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    first = shard_of(rank, size, LENGTHS, 0)
    answers: dict[str, Any] = {
        "tokens": first.offsets,
        "log_probs": worker.actor.log_probs(first),
        "metrics": [],
    }
    for seed, lengths in enumerate((LENGTHS, [12], [8, 8, 20])):
        answers["metrics"].append(worker.actor.update(shard_of(rank, size, lengths, seed)))
        answers["metrics"].append(worker.critic.update(shard_of(rank, size, lengths, seed)))
    answers["ref_log_probs"] = worker.reference.log_probs(first)  # updates must not change it
    answers["values"] = worker.critic.values(first)
    worker.save_policy(Path(out) / "weights", "float32")
    worker.sender.write(str(Path(out) / "shared"), 3, [], "bfloat16")
    answers["shared"] = whole_policy(Path(out) / "shared" / "3") if rank == 0 else {}
    answers["sent"] = sent_policy(worker, num_receivers=int(rank == 0), stream=f"test-{port}")
    # The driver renames the folder when all ranks are done.
    answers["problems"] = worker.save_checkpoint(Path(out) / "global_step_3.tmp")
    answers["random"] = draw_random()
    answers["num_bytes"] = worker.checkpoint_memory()[1]
    with held_back_writes():
        worker.start_checkpoint(Path(out) / "in_background")
        answers["next"] = next_metrics(worker, rank, size)
    answers["problems"] += asyncio.run(worker.finish_checkpoint())
    blocked = Path(out) / "file" / "checkpoint"  # below a file
    blocked.parent.touch()
    answers["refused"] = [worker.save_checkpoint(blocked)]
    worker.start_checkpoint(blocked)
    answers["refused"].append(asyncio.run(worker.finish_checkpoint()))
    worker.shutdown()
    return answers


def sent_policy(worker: TrainerWorker, num_receivers: int, stream: str) -> dict[str, Tensor]:
    """Send the policy; return the weights that a receiver on this device got, if there is one."""
    with ThreadPoolExecutor(1) as pool:
        if num_receivers:
            receiving = pool.submit(lambda: dict(receive(stream, worker.device)))
        IpcSender(worker).send(num_receivers, stream, "bfloat16")
        return receiving.result() if num_receivers else {}


@contextlib.contextmanager
def held_back_writes() -> Iterator[None]:
    """Delay background writes until the body has ended."""
    gate, write = threading.Event(), state_dict_saver.save

    def wait_and_write(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return write(*arguments, **options)

    state_dict_saver.save = wait_and_write
    try:
        yield
    finally:
        gate.set()
        state_dict_saver.save = write


def draw_random() -> tuple[float, float, float]:
    """Draw a number from each random generator."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def next_metrics(worker: TrainerWorker, rank: int, size: int) -> list[dict[str, float]]:
    """Return the metrics of the update after the checkpoint."""
    shard = shard_of(rank, size, LENGTHS, 7)
    return [worker.actor.update(shard), worker.critic.update(shard)]


def resume(rank: int, size: int, port: int, model: str, out: str) -> dict[str, Any]:
    """Resume from the checkpoint of `train` in a new run."""
    config = tiny_config(model, size)
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 20
    config.critic.ppo_max_token_len_per_gpu = 20
    worker = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    checkpoint = folders.latest(Path(out))
    assert checkpoint is not None
    worker.load_checkpoint(checkpoint)
    drawn = draw_random()
    worker.save_policy(Path(out) / f"resumed_{size}", "float32")
    answers = {"next": next_metrics(worker, rank, size), "random": drawn}
    worker.shutdown()
    return answers
