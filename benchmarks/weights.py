"""`python -m benchmarks.weights`: how fast ranks transfer weights to an engine.

Two ranks on the CPU hold a model of random weights in float32 and transfer it as bfloat16, in
turns: one rank writes what was gathered in float32 into shared memory, all write what was cast
before, or it is sent (`rollout.weight_sync=ipc`). A transfer ends when another process, in place
of an engine, has copied all tensors into its own memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from verl.machine import SHARED_MEMORY
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks
from verl.training.weight_stream import receive, send
from verl.training.weights import write_weights

RANKS = 2
WAYS = ("one rank writes", "all ranks write", "sent")
CPU = torch.device("cpu")
console = Console(soft_wrap=True)


def shape(layers: int) -> LlamaConfig:
    """Blocks as in Qwen2.5-1.5B, with a small vocabulary."""
    return LlamaConfig(
        vocab_size=8192, hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=2,
    )  # fmt: skip


def engine(link: Connection, layers: int) -> None:
    """An engine's life: what stands for its model takes each version."""
    torch.set_num_threads(1)
    model = dict(LlamaForCausalLM(shape(layers)).bfloat16().named_parameters())
    while (given := link.recv()) is not None:
        folder = Path(given)
        for name, tensor in read(folder) if folder.is_absolute() else receive(given, CPU):
            model[name].data.copy_(tensor)
        link.send(None)


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of all files."""
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


def measure(rank: int, layers: int, repeats: int, out: str, link: Connection) -> None:
    """A rank's life; the first one talks to the engine, and tells."""
    torch.set_num_threads(1)
    meeting = f"file://{out}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    lm = LlamaForCausalLM(shape(layers))
    model = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, FsdpOptions(torch.bfloat16))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(len(WAYS) * (repeats + 1)):
        folder, way = Path(out, str(turn)), WAYS[turn % len(WAYS)]
        dist.barrier()
        start = time.perf_counter()
        hand_over(model, folder, lm.config, rank, way, link)
        if turn >= len(WAYS):
            seconds[way].append(time.perf_counter() - start)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        link.send(None)
        tell(seconds, 2 * sum(parameter.numel() for parameter in lm.parameters()))
    dist.destroy_process_group()


def hand_over(
    model: FsdpModel, folder: Path, config: LlamaConfig, rank: int, way: str, link: Connection
) -> None:
    """One version of the weights, until the engine has it."""
    if way == "sent":
        if rank == 0:
            link.send(folder.name)
        named = model.full_parameters("lm.", dtype=torch.bfloat16)
        send(named, folder.name, CPU, int(rank == 0), torch.bfloat16)
    else:
        write(model, folder, config, rank, all_write=way == WAYS[1])
        dist.barrier()
        if rank == 0:
            link.send(str(folder))
    if rank == 0:
        link.recv()


def write(model: FsdpModel, folder: Path, config: LlamaConfig, rank: int, all_write: bool) -> None:
    """One version of the weights."""
    if all_write:
        named = model.full_parameters("lm.", dtype=torch.bfloat16)
        write_weights(folder, named, config, "bfloat16", rank, RANKS)
    elif rank == 0:
        write_weights(folder, model.full_parameters("lm."), config, "bfloat16")
    else:
        drain(model.full_parameters("lm."))


def drain(named: Iterator[tuple[str, Tensor]]) -> None:
    """What a rank does that only helps to gather."""
    for _ in named:
        pass


def tell(seconds: dict[str, list[float]], size: int) -> None:
    """Medians and their ratio."""
    console.print(f"{size / 1e9:.2f} GB, {RANKS} ranks")
    for way, found in seconds.items():
        middle = statistics.median(found)
        console.print(f"{way}: {middle:.2f} s ({size / 1e9 / middle:.2f} GB/s), {found}")
    one, every, sent = (statistics.median(found) for found in seconds.values())
    console.print(f"all against one {one / every:.2f}, sent against all {every / sent:.2f}")


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as out:
        context = mp.get_context("spawn")
        ours, its = context.Pipe()
        process = context.Process(target=engine, args=(its, args.layers), daemon=True)
        process.start()
        mp.spawn(measure, (args.layers, args.repeats, out, ours), nprocs=RANKS)
        process.join()


if __name__ == "__main__":
    main()
