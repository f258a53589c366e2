"""`python -m benchmarks.weight_delta MODEL`: bytes and seconds of whole and changed weights.

The trainer's own updates (one rank on the CPU, AdamW on float32 weights, gradients of a policy loss
with random advantages on text) move the model; after each one the rank broadcasts it in bfloat16 to
another process, once whole and once as changes (`rollout.weight_delta`), by gloo on this machine. A
transfer ends when that process has copied all tensors, in place of an engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from transformers import AutoTokenizer

from verl.config import ActorConfig, OptimConfig
from verl.training.actor import Actor, TokenBudgets
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks, load_causal_lm
from verl.training.weight_broadcast import WeightBroadcast, WeightReceiver
from verl.types import TokenBatch

TEXTS = Path(__file__).resolve().parents[1] / "docs"
HOST, CPU = "127.0.0.1", torch.device("cpu")
LENGTH, PROMPT = 128, 32
"""Tokens of each trajectory, and of them those that are not learned from."""
console = Console(soft_wrap=True)


def engine(link: Connection) -> None:
    """An engine's life: what stands for its model takes what each stream brings."""
    torch.set_num_threads(1)
    receivers: dict[str, WeightReceiver] = {}
    model: dict[str, torch.Tensor] = {}
    while (stream := link.recv()) is not None:
        if stream not in receivers:
            receivers[stream] = WeightReceiver(stream, CPU)
        for name, tensor in receivers[stream].receive():
            model.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        link.send(None)


def batches(model: str, num_trajectories: int) -> Iterator[TokenBatch]:
    """Text of this project's pages with random advantages; another part of it each time."""
    text = "\n".join(path.read_text() for path in sorted(TEXTS.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text)["input_ids"])
    draw, num_tokens = torch.Generator().manual_seed(0), num_trajectories * LENGTH
    mask = (torch.arange(LENGTH) >= PROMPT).repeat(num_trajectories)
    for start in range(0, len(ids) - num_tokens + 1, num_tokens):
        advantages = torch.randn(num_trajectories, generator=draw).repeat_interleave(LENGTH)
        yield TokenBatch(
            torch.arange(num_trajectories + 1) * LENGTH,
            tokens={
                "input_ids": ids[start : start + num_tokens],
                "policy_mask": mask, "loss_mask": mask,
                "rollout_log_probs": torch.zeros(num_tokens), "advantages": advantages * mask,
                "loss_weights": mask / mask.sum(),
            },
        )  # fmt: skip


def measure(model: str, lr: float, args: argparse.Namespace, link: Connection) -> None:
    """A run at one learning rate: transfers of each kind before it and after each update."""
    lm = load_causal_lm(model, torch.float32)
    options = FsdpOptions(torch.float32, num_updates=args.steps, optim=OptimConfig(lr=lr))
    policy = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, options)
    actor = Actor(policy, ActorConfig(), TokenBudgets(1024, 2048))
    ways = {way: WeightBroadcast(HOST, 1, CPU, way == "changes") for way in ("whole", "changes")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step, batch in zip(range(args.steps + 1), batches(model, args.trajectories), strict=False):
        if step:
            actor.update(batch)
        for way, broadcast in ways.items():
            begin = time.perf_counter()
            link.send(broadcast.stream)
            named = policy.full_parameters("lm.", dtype=torch.bfloat16)
            sent = broadcast.send(named, torch.bfloat16)
            link.recv()
            seconds[way].append(time.perf_counter() - begin)
            share = f"{sent.num_changed / sent.num_elements:.4%}" if sent.num_elements else "-"
            console.print(f"lr {lr:g}, step {step}, {way}: changed {share}, {sent.num_bytes:,} B, "
                          f"rank {sent.seconds:.2f} s, whole {seconds[way][-1]:.2f} s")  # fmt: skip
    for way, found in seconds.items():
        console.print(f"lr {lr:g}, {way}: median {statistics.median(found[1:]):.2f} s")


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(prog="benchmarks.weight_delta", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-5, 1e-6])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=16)
    args = parser.parse_args()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    context = mp.get_context("spawn")
    for lr in args.lr:
        ours, its = context.Pipe()
        process = context.Process(target=engine, args=(its,), daemon=True)
        process.start()
        measure(args.model, lr, args, ours)
        ours.send(None)
        process.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
