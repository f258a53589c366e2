"""Memory for saving: each rank's peak resident set while a checkpoint is written.

`python -m tests.nightly.proofs.checkpoint_memory` shards models over 1, 2 and 4 real processes
(gloo, CPU), weights and AdamW moments in float32, and saves them in place, in the background (from
a copy) and, for comparison, as earlier systems do: gathered on the first rank. The kernel's
high-water mark is reset after freed memory is returned, so that no short peak is missed. Every
rank is a new process for each model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from verl.config import OptimConfig
from verl.ports import free_port
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks
from verl.training.shards import ShardWriter, save_shards, shard_bytes

MIB = 1 << 20
SIZES = {"small": (256, 8), "large": (512, 8)}
"""Width and number of layers of the models: the second has four times the weights per layer."""
VOCABULARY = 8192
METHODS = ("in place", "background", "gathered")


@dataclass(frozen=True)
class Figure:
    """Measurement of one method of saving."""

    model: str
    parameters: int
    num_ranks: int
    method: str
    shard_mib: float
    """Size of the largest shard of a rank."""
    extra_mib: float
    """Largest growth of a rank's resident set."""

    @property
    def ratio(self) -> float:
        """Growth relative to the shard."""
        return self.extra_mib / self.shard_mib


def build_engine(width: int, layers: int) -> FsdpModel:
    """Build a random model with optimizer state, sharded over all ranks."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=width // 64, num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config)
    options = FsdpOptions(torch.float32, num_updates=1, optim=OptimConfig())
    engine = FsdpModel(LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), options)
    for tensor in engine.state_tensors().values():
        if tensor.ndim:
            tensor.add_(1e-3)  # pages of zeros that were never written use no memory
    return engine


def gather(engine: FsdpModel, folder: Path) -> None:
    """Gather whole tensors on the first rank and write one file, as this project does not do."""
    gathered = {}
    for name, tensor in engine.state_tensors().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full
    if gathered:
        folder.mkdir(parents=True)
        torch.save(gathered, folder / "all.pt")
    dist.barrier()


def save(engine: FsdpModel, method: str, folder: Path, lm_config: LlamaConfig) -> None:
    """Write the engine's state by one of METHODS, and wait for its completion."""
    problem = ""
    if method == "gathered":
        gather(engine, folder)
    elif method == "in place":
        problem = save_shards(folder, {"actor": engine}, lm_config)
    else:
        writer = ShardWriter()
        writer.start(folder, {"actor": engine}, lm_config)
        problem = writer.finish()
    assert not problem, problem


def growth_mib(work: Callable[[], None]) -> float:
    """Return the growth of this process's resident set above its current size during `work`."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """Return a value of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_rank(
    rank: int, size: int, port: int, shape: tuple[int, int], folder: Path, answers: Queue[object]
) -> None:
    """Measure one rank's growth and shard for each method."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    engine = build_engine(*shape)
    source = folder / "tokenizer"
    source.mkdir(exist_ok=True)
    lm_config = LlamaConfig(name_or_path=str(source))
    # Each method runs twice and the second counts: the first loads code and opens connections.
    growths = {}
    for number in (0, 1):
        for method in METHODS:
            target = folder / f"{method} {number}"
            growths[method] = growth_mib(partial(save, engine, method, target, lm_config))
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    answers.put((shard_bytes({"actor": engine}) / MIB, growths, count))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, num_ranks: int) -> list[Figure]:
    """Return the figures of one model on a number of ranks."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    answers: Queue[object] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shared = num_ranks, port, SIZES[name], Path(folder), answers
        ranks = [context.Process(target=run_rank, args=(r, *shared)) for r in range(num_ranks)]
        for process in ranks:
            process.start()
        rows: list[tuple[float, dict[str, float], int]] = [answers.get() for _ in ranks]  # type: ignore[misc]
        for process in ranks:
            process.join()
    shard = max(row[0] for row in rows)
    return [
        Figure(name, rows[0][2], num_ranks, method, shard, max(row[1][method] for row in rows))
        for method in METHODS
    ]


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    columns = " | ".join(f"{method}, MiB" for method in METHODS)
    lines = [f"| parameters | ranks | shard, MiB | {columns} |", "|---" * (3 + len(METHODS)) + "|"]
    for key in dict.fromkeys((f.model, f.num_ranks) for f in figures):
        own = [f for f in figures if (f.model, f.num_ranks) == key]
        cells = " | ".join(f"{f.extra_mib:.0f} ({f.ratio:.2f} shards)" for f in own)
        head = f"| {own[0].parameters / 1e6:.1f}M | {key[1]} | {own[0].shard_mib:.0f} | "
        lines.append(f"{head}{cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    figures = [f for name in options.sizes for n in options.ranks for f in measure(name, n)]
    print(table(figures))  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
