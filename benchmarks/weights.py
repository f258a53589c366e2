"""Measure how fast ranks transfer weights to an engine: `python -m benchmarks.weights`.

Two ranks on the CPU have a model of random float32 weights and transfer it as bfloat16 in three
modes, alternately. In the first, the weights are gathered in float32, and one rank writes them to
shared memory. In the second, they are cast before they are gathered, and all ranks write. In the
third, they are sent (`rollout.weight_sync=ipc`). Another process takes the place of the engine; a
transfer ends when it has copied all tensors into its own memory.
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

from verl.ext.transports.ipc import receive, send
from verl.machine import SHARED_MEMORY
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks
from verl.training.weights import write_weights

NUM_RANKS = 2
ONE_WRITES, ALL_WRITE, SENT = "one rank writes", "all ranks write", "sent"
MODES = (ONE_WRITES, ALL_WRITE, SENT)
CPU = torch.device("cpu")
console = Console(soft_wrap=True)


def model_config(layers: int) -> LlamaConfig:
    """Return a configuration with the blocks of Qwen2.5-1.5B and a small vocabulary."""
    return LlamaConfig(
        vocab_size=8192, hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=2,
    )  # fmt: skip


def engine(link: Connection, layers: int) -> None:
    """Act as an engine: copy each announced version of the weights, until None arrives.

    A version is announced by the folder of its files, or by the name of a stream.
    """
    torch.set_num_threads(1)
    model = dict(LlamaForCausalLM(model_config(layers)).bfloat16().named_parameters())
    while (source := link.recv()) is not None:
        folder = Path(source)
        for name, tensor in read(folder) if folder.is_absolute() else receive(source, CPU):
            model[name].data.copy_(tensor)
        link.send(None)


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of all files in the folder."""
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


def measure(rank: int, layers: int, repeats: int, out: str, link: Connection) -> None:
    """Run one rank; rank 0 also announces the versions to the engine and prints the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{out}/rendezvous", rank=rank, world_size=NUM_RANKS)
    lm = LlamaForCausalLM(model_config(layers))
    model = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, FsdpOptions(torch.bfloat16))
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(len(MODES) * (repeats + 1)):
        folder, mode = Path(out, str(number)), MODES[number % len(MODES)]
        dist.barrier()
        began = time.perf_counter()
        transfer(model, folder, lm.config, rank, mode, link)
        if number >= len(MODES):  # The first transfer of each mode is the warm-up.
            seconds[mode].append(time.perf_counter() - began)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        link.send(None)
        report(seconds, 2 * sum(parameter.numel() for parameter in lm.parameters()))
    dist.destroy_process_group()


def transfer(
    model: FsdpModel, folder: Path, config: LlamaConfig, rank: int, mode: str, link: Connection
) -> None:
    """Transfer one version of the weights and wait until the engine has copied it."""
    if mode == SENT:
        if rank == 0:
            link.send(folder.name)
        named = model.full_parameters("lm.", dtype=torch.bfloat16)
        send(named, folder.name, CPU, int(rank == 0), torch.bfloat16)
    else:
        write(model, folder, config, rank, all_write=mode == ALL_WRITE)
        dist.barrier()
        if rank == 0:
            link.send(str(folder))
    if rank == 0:
        link.recv()


def write(model: FsdpModel, folder: Path, config: LlamaConfig, rank: int, all_write: bool) -> None:
    """Write one version of the weights to `folder`."""
    if all_write:
        named = model.full_parameters("lm.", dtype=torch.bfloat16)
        write_weights(folder, named, config, "bfloat16", rank, NUM_RANKS)
    elif rank == 0:
        write_weights(folder, model.full_parameters("lm."), config, "bfloat16")
    else:
        for _ in model.full_parameters("lm."):
            pass  # Gathering is collective: this rank takes part without using the result.


def report(seconds: dict[str, list[float]], size: int) -> None:
    """Print the median of each mode and the ratios of the medians; `size` in bytes."""
    console.print(f"{size / 1e9:.2f} GB, {NUM_RANKS} ranks")
    medians = {mode: statistics.median(values) for mode, values in seconds.items()}
    for mode, median in medians.items():
        rate = size / 1e9 / median
        console.print(f"{mode}: {median:.2f} s ({rate:.2f} GB/s), {seconds[mode]}")
    all_speedup = medians[ONE_WRITES] / medians[ALL_WRITE]
    sent_speedup = medians[ALL_WRITE] / medians[SENT]
    console.print(f"all against one {all_speedup:.2f}, sent against all {sent_speedup:.2f}")


def main() -> None:
    """Start the engine and the ranks, and wait for them."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as out:
        context = mp.get_context("spawn")
        link, engine_link = context.Pipe()
        process = context.Process(target=engine, args=(engine_link, args.layers), daemon=True)
        process.start()
        mp.spawn(measure, (args.layers, args.repeats, out, link), nprocs=NUM_RANKS)
        process.join()


if __name__ == "__main__":
    main()
