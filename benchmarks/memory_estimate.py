"""Compare the memory estimate with measurements on the CPU: `python -m benchmarks.memory_estimate`.

Runs one training rank with models of two sizes, and compares each item of the estimate with the
growth of the rank's resident memory. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.ext.memory.estimate import Estimate, Setting, estimate
from verl.ext.memory.needs import CPU_HEAP, Need, Phase
from verl.ext.model_shape import ModelShape
from verl.machine import Machine
from verl.ports import free_port
from verl.preflight.undecided import fill_undecided
from verl.training.worker import TrainerWorker

MB = 1e6
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Environment in which malloc returns each tensor of 64 KiB or more to the system once freed."""
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192}  # fmt: skip
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384}  # fmt: skip
LENGTHS = (128,) * 8
BUDGET = sum(LENGTHS) // 2


@dataclass(frozen=True)
class Row:
    """One item of the estimate for one model size, in bytes."""

    case: str
    item: str
    estimated: int
    measured: int


def resident() -> int:
    """Return the private resident bytes of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def peak_growth(work: Callable[[], Any]) -> int:
    """Return the largest growth of this process while `work` runs, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak so far
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def rank_options(path: str) -> Config:
    """Return the configuration of one PPO rank in float32 with gradient checkpointing."""
    config = Config()
    config.actor_rollout_ref.model.path = path
    config.algorithm.adv_estimator = "gae"
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = BUDGET
    config.critic.ppo_max_token_len_per_gpu = BUDGET
    config.data.max_prompt_length, config.data.max_response_length = LENGTHS[0] - 28, 28
    config.trainer.n_gpus_per_node = 1
    config.trainer.device, config.trainer.compute_dtype = "cpu", "float32"
    return fill_undecided(config)


def batch() -> TokenBatch:
    """Return a batch of random trajectories, trained on except for each first token."""
    total, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.ones(total, dtype=torch.bool)
    mask[offsets[:-1]] = False
    floats = {
        name: torch.randn(total, generator=generator)
        for name in ("advantages", "returns", "values", "old_log_probs", "ref_log_probs")
    }
    ids = torch.randint(3, 8000, (total,), generator=generator)
    weights = loss_weights(mask, offsets, "token-mean", 1.0)
    tokens = {"input_ids": ids, "loss_mask": mask, "policy_mask": mask, "loss_weights": weights}
    return TokenBatch(offsets, tokens | floats)


def measure_rank(path: str) -> dict[str, int]:
    """Measure a rank in this fresh process; returns the bytes that each phase of it adds."""
    base, config, data = resident(), rank_options(path), batch()
    measured = {"process": base}
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), 100)
    measured["held"] = resident() - base
    measured[Phase.LOG_PROBS] = peak_growth(lambda: worker.actor.log_probs(data))
    worker.actor.update(data)  # The first update also allocates what is kept, such as moments.
    worker.critic.update(data)
    measured[Phase.VALUES] = peak_growth(lambda: worker.critic.values(data))
    measured[Phase.UPDATE_ACTOR] = peak_growth(lambda: worker.actor.update(data))
    measured[Phase.UPDATE_CRITIC] = peak_growth(lambda: worker.critic.update(data))
    worker.shutdown()
    return measured


def rank_rows(case: str, shape_options: dict[str, int]) -> list[Row]:
    """Compare estimate and measurement for one model size, measured in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        llama = LlamaConfig(**shape_options, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(llama)
        model.save_pretrained(folder)
        shape = ModelShape.of(model.config)
        command = [sys.executable, "-m", "benchmarks.memory_estimate", "--one-rank", folder]
        done = subprocess.run(
            command, env={**os.environ, **RETURN_FREED_MEMORY}, stdout=subprocess.PIPE, check=True
        )
        measured = json.loads(done.stdout.splitlines()[-1])
        machine = Machine.now(with_devices=False)
        estimated = estimate(rank_options(folder), Setting(shape, shape, False, machine, "float32"))
    return [
        Row(case, "process", _process(estimated), measured["process"]),
        Row(case, "weights and moments", _held(estimated), measured["held"]),
        *(Row(case, phase, _added(estimated, phase), measured[phase])
          for phase in (Phase.LOG_PROBS, Phase.VALUES, Phase.UPDATE_ACTOR, Phase.UPDATE_CRITIC)),
    ]  # fmt: skip


def _process(estimated: Estimate) -> int:
    return sum(need.bytes for need in estimated.needs if need.name == "processes of the ranks")


def _is_held(need: Need) -> bool:
    return need.name.endswith((": weights", ": moments")) and not need.name.startswith("engines")


def _held(estimated: Estimate) -> int:
    return sum(need.bytes for need in estimated.needs if _is_held(need))


def _added(estimated: Estimate, phase: Phase) -> int:
    """Return the bytes that a phase needs in addition, without the share that malloc keeps."""
    needs = [need for need in estimated.needs if phase in need.phases and len(need.phases) < 6]
    return int(sum(need.bytes for need in needs) / CPU_HEAP)


def main() -> None:
    """Measure both sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-rank", metavar="MODEL", help="measure this model, print JSON")
    options = parser.parse_args()
    if options.one_rank:
        print(json.dumps(measure_rank(options.one_rank)))  # noqa: T201
        return
    rows = [row for case in (("small", SMALL), ("large", LARGE)) for row in rank_rows(*case)]
    print("| case | item | estimated MB | measured MB | ratio |\n|---|---|---|---|---|")  # noqa: T201
    for row in rows:
        ratio = row.estimated / max(row.measured, 1)
        amounts = f"{row.estimated / MB:,.0f} | {row.measured / MB:,.0f} | {ratio:.2f}"
        print(f"| {row.case} | {row.item} | {amounts} |")  # noqa: T201


if __name__ == "__main__":
    main()
