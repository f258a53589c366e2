"""Compare transfers of all and of changed weights: `python -m benchmarks.weight_delta MODEL`.

The trainer's own updates change the model: one rank on the CPU, AdamW on float32 weights, gradients
of a policy loss with random advantages on text. After each update the rank broadcasts the model in
bfloat16 to another process with gloo, once whole and once as changes (`rollout.weight_delta`). The
other process takes the place of an engine; a transfer ends when it has copied all tensors. Prints
the bytes and seconds.
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
from verl.training.actor import Actor
from verl.training.budgets import TokenBudgets
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, blocks, load_causal_lm
from verl.training.weight_broadcast import WeightBroadcast, WeightReceiver
from verl.types import TokenBatch

TEXTS = Path(__file__).resolve().parents[1] / "docs"
HOST, CPU = "127.0.0.1", torch.device("cpu")
LENGTH, PROMPT = 128, 32
"""Tokens of each trajectory, and the number of them at its start that are not trained on."""
console = Console(soft_wrap=True)


def engine(link: Connection) -> None:
    """Act as an engine: copy the weights of each stream that is announced, until None arrives."""
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
    """Yield batches of successive text from this project's documentation, with random advantages.

    Text at the end that does not fill a batch is left out.
    """
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
    """Train with one learning rate; transfer in both modes at first and after each update."""
    lm = load_causal_lm(model, torch.float32)
    options = FsdpOptions(torch.float32, num_updates=args.steps, optim=OptimConfig(lr=lr))
    policy = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, options)
    actor = Actor(policy, ActorConfig(), TokenBudgets(1024, 2048))
    modes = {
        mode: WeightBroadcast(HOST, 1, CPU, mode == "changes") for mode in ("whole", "changes")
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for step, batch in zip(range(args.steps + 1), batches(model, args.trajectories), strict=False):
        if step:
            actor.update(batch)
        for mode, broadcast in modes.items():
            began = time.perf_counter()
            link.send(broadcast.stream)
            named = policy.full_parameters("lm.", dtype=torch.bfloat16)
            sent = broadcast.send(named, torch.bfloat16)
            link.recv()
            seconds[mode].append(time.perf_counter() - began)
            share = f"{sent.num_changed / sent.num_elements:.4%}" if sent.num_elements else "-"
            console.print(
                f"lr {lr:g}, step {step}, {mode}: changed {share}, {sent.num_bytes:,} B, "
                f"rank {sent.seconds:.2f} s, total {seconds[mode][-1]:.2f} s"
            )
    for mode, values in seconds.items():
        console.print(f"lr {lr:g}, {mode}: median {statistics.median(values[1:]):.2f} s")


def main() -> None:
    """Measure at each learning rate, each with a new engine process."""
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
        link, engine_link = context.Pipe()
        process = context.Process(target=engine, args=(engine_link,), daemon=True)
        process.start()
        measure(args.model, lr, args, link)
        link.send(None)
        process.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
