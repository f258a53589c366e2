"""LoRA against full training: parameters, bytes and time of one rank's PPO step, by measurement.

`python -m tests.nightly.proofs.lora` builds a model of SmolLM2-135M's shape and runs the same
updates of policy and critic, with KL to the reference, in a new process for each way of training,
without an engine. Times are processor seconds, which other processes disturb less than
wall-clock time.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.ext.lora.model import write_adapter
from verl.ports import free_port
from verl.preflight.memory.check import fill_undecided
from verl.training.worker import TrainerWorker
from verl.types import TokenBatch

Figures = dict[str, float]
MIB = 1 << 20
WAYS = {"full": (0, 0), "LoRA policy, full critic": (32, 0), "LoRA, shared base": (32, 32)}
"""LoRA ranks of policy and critic for each way of training; 0 for full training."""


def write_model(folder: Path) -> None:
    """Write a random model of SmolLM2-135M's shape: 134.5M parameters in bfloat16."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_config(model: str, ranks: tuple[int, int]) -> Config:
    """Return the options of PPO with KL in the loss, on one rank."""
    config = Config()
    config.actor_rollout_ref.model.path = model
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.model.lora_rank, config.critic.model.lora_rank = ranks
    config.trainer.n_gpus_per_node = 1
    return fill_undecided(config)


def make_batch(num_seqs: int, length: int) -> TokenBatch:
    """Return random tokens, half of them the policy's, with every column that an update reads."""
    generator = torch.Generator().manual_seed(0)
    total, offsets = num_seqs * length, torch.arange(num_seqs + 1) * length
    mask = torch.arange(total) % length >= length // 2
    names = ("old_log_probs", "advantages", "values", "returns")
    columns = {name: torch.randn(total, generator=generator) for name in names}
    columns["old_log_probs"] -= 10.0
    ids = torch.randint(0, 49152, (total,), generator=generator)
    weights = loss_weights(mask, offsets, "token-mean")
    tokens = {"input_ids": ids, "policy_mask": mask, "loss_weights": weights, **columns}
    return TokenBatch(offsets, tokens, columns={"group": [str(i) for i in range(num_seqs)]})


def seconds(action: Callable[[], object]) -> float:
    """Return the processor time of `action` over all threads."""
    start = time.process_time()
    action()
    return time.process_time() - start


def folder_mib(folder: Path) -> float:
    """Return the MiB of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / MIB


def measure(model: str, ranks: tuple[int, int], steps: int, batch: TokenBatch, out: str) -> None:
    """Measure one way of training in this process; the figures are written to the file `out`."""
    own = psutil.Process()
    before = own.memory_info().rss
    port = free_port()
    worker = TrainerWorker(make_config(model, ranks), 0, 1, "127.0.0.1", port, steps)

    def step() -> None:
        batch.tokens["ref_log_probs"] = worker.reference.log_probs(batch)
        worker.critic.update(batch)
        worker.actor.update(batch)

    step()
    times = [seconds(step) for _ in range(steps)]
    learned = [x for engine in worker.models.values() for x in engine.trained_parameters().values()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save = seconds(lambda: worker.save_checkpoint(folder / "checkpoint"))
        adapt = functools.partial(write_adapter, worker.actor.model)
        sync = adapt if ranks[0] else worker.save_policy
        transfer = seconds(lambda: sync(folder / "update"))
        figures: Figures = {
            "trained parameters, million": sum(x.numel() for x in learned) / 1e6,
            "resident after steps, MiB": (own.memory_info().rss - before) / MIB,
            "peak resident, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            - before / MIB,
            "step, CPU s (median)": statistics.median(times),
            "checkpoint, MiB": folder_mib(folder / "checkpoint"),
            "checkpoint, CPU s": save,
            "weights to engine, MiB": folder_mib(folder / "update"),
            "weights to engine, CPU s": transfer,
        }
    worker.shutdown()
    Path(out).write_text(json.dumps(figures))


def main() -> None:
    """Measure every way and print a Markdown table, with ratios to full training."""
    parser = argparse.ArgumentParser(description="LoRA against full training.")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--num_seqs", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    options = parser.parse_args()
    batch, found = make_batch(options.num_seqs, options.length), []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        model, out = Path(name) / "model", Path(name) / "figures.json"
        write_model(model)
        for ranks in WAYS.values():
            arguments = (str(model), ranks, options.steps, batch, str(out))
            process = context.Process(target=measure, args=arguments)
            process.start()
            process.join()
            found.append(json.loads(out.read_text()))
            out.unlink()
    print("|  | " + " | ".join(WAYS) + " |\n|---" + "|---:" * len(WAYS) + "|")  # noqa: T201
    for name, full in found[0].items():
        cells = (f"{f[name]:,.1f} ({f[name] / full:.2f} ×)" for f in found[1:])
        print(f"| {name} | {full:,.1f} | " + " | ".join(cells) + " |")  # noqa: T201


if __name__ == "__main__":
    main()
