"""`python -m benchmarks.weights`: how fast ranks write the weights that engines read.

Two ranks on the CPU hold a model of random weights in float32 and write it as bfloat16 into shared
memory, in turns: one rank writes what was gathered in float32, or all write what was cast before.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from verl.machine import SHARED_MEMORY
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks
from verl.training.weights import write_weights

RANKS = 2
console = Console(soft_wrap=True)


def shape(layers: int) -> LlamaConfig:
    """Blocks as in Qwen2.5-1.5B, with a small vocabulary."""
    return LlamaConfig(
        vocab_size=8192, hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=2,
    )  # fmt: skip


def measure(rank: int, layers: int, repeats: int, out: str) -> None:
    """A rank's life; the first one tells."""
    torch.set_num_threads(1)
    meeting = f"file://{out}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    lm = LlamaForCausalLM(shape(layers))
    engine = FsdpModel(
        LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), FsdpOptions(torch.bfloat16)
    )
    seconds: dict[str, list[float]] = {"one rank writes": [], "all ranks write": []}
    for turn in range(2 * repeats + 2):
        folder, way = Path(out, str(turn)), list(seconds)[turn % 2]
        dist.barrier()
        start = time.perf_counter()
        write(engine, folder, lm.config, rank, all_write=turn % 2 == 1)
        dist.barrier()
        if turn > 1:
            seconds[way].append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    if rank == 0:
        tell(seconds, size)
    dist.destroy_process_group()


def write(engine: FsdpModel, folder: Path, config: LlamaConfig, rank: int, all_write: bool) -> None:
    """One version of the weights."""
    if all_write:
        named = engine.full_parameters("lm.", dtype=torch.bfloat16)
        write_weights(folder, named, config, "bfloat16", rank, RANKS)
    elif rank == 0:
        write_weights(folder, engine.full_parameters("lm."), config, "bfloat16")
    else:
        drain(engine.full_parameters("lm."))


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
    one, every = (statistics.median(found) for found in seconds.values())
    console.print(f"ratio {one / every:.2f}")


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as out:
        mp.spawn(measure, (args.layers, args.repeats, out), nprocs=RANKS)


if __name__ == "__main__":
    main()
