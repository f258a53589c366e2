"""Training ranks on the device against a rank on the CPU, and a checkpoint taken up again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.config import Config
from verl.packing import join_tokens, split_by_work
from verl.ports import free_port
from verl.preflight.memory.check import with_options
from verl.training.worker import TrainerWorker

LENGTHS = [14, 9, 17, 6, 11]
BATCHES = (LENGTHS, [12], [8, 8, 20])
"""Of three updates; the second leaves one of two ranks without a sequence."""
TOLERANCE = 1e-4
MOST_TRIES = 20
"""Updates of float16 until the loss's scale, halved at each overflow, has come down."""
ACTOR, CRITIC, REF = (
    f"{part}.fsdp_config"
    for part in ("actor_rollout_ref.actor", "critic.model", "actor_rollout_ref.ref")
)
LORA = {"actor_rollout_ref.model.lora_rank": 4, "critic.model.lora_rank": 4}
PPO = {"algorithm.adv_estimator": "gae"}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "param": {f"{part}.param_offload": True for part in (ACTOR, CRITIC)},
    "optimizer": {f"{part}.optimizer_offload": True for part in (ACTOR, CRITIC)},
    "reference": {f"{REF}.param_offload": True},
}
OFFLOADS["all"] = OFFLOADS["param"] | OFFLOADS["optimizer"] | OFFLOADS["reference"]
KINDS: dict[str, dict[str, Any]] = {"grpo": {}, "ppo": PPO, "lora": LORA, "ppo_lora": LORA | PPO}
PAIRS = [("grpo", offload) for offload in OFFLOADS] + [
    ("ppo", "none"), ("ppo", "all"), ("lora", "none"), ("lora", "param"), ("ppo_lora", "param"),
]  # fmt: skip
Answers = dict[str, Any]


@contextmanager
def joined(
    config: Config, rank: int = 0, size: int = 1, port: int | None = None
) -> Iterator[TrainerWorker]:
    """A rank in this process, which leaves the process group whatever becomes of it."""
    try:
        yield TrainerWorker(config, rank, size, "127.0.0.1", port or free_port(), 10)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def play(config: Config, rank: int = 0, size: int = 1, port: int | None = None) -> Answers:
    """What a rank answers, before and after three updates."""
    with joined(config, rank, size, port) as worker:
        first = split_by_work(random_batch(LENGTHS), size).shards[rank]
        answers: Answers = {"log_probs": worker.actor.log_probs(first), "norms": []}
        assert worker.reference is not None
        answers["ref_log_probs"] = worker.reference.log_probs(first)
        answers["start"] = weights(worker)
        for seed, lengths in enumerate(BATCHES):
            shard = split_by_work(random_batch(lengths, seed=seed), size).shards[rank]
            answers["norms"].append(worker.actor.update(shard)["actor/grad_norm"])
            if worker.critic is not None:
                answers["norms"].append(worker.critic.update(shard)["critic/grad_norm"])
        if worker.critic is not None:
            answers["values"] = worker.critic.values(first)
        return answers | {"weights": weights(worker)}


def weights(worker: TrainerWorker) -> Tensor:
    """All that is learned, by policy and critic, as one float64 vector."""
    found = [
        x for engine in worker.models.values() for x in engine.full_trained_parameters().values()
    ]
    return torch.cat([x.detach().cpu().double().flatten() for x in found])


def play_ranks(configs: dict[str, Config], size: int, folder: Path) -> dict[str, Answers]:
    """`play` on several ranks, a process and a card each; per-token answers joined."""
    if size == 1:
        return {name: play(config) for name, config in configs.items()}
    ports = [free_port() for _ in configs]
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        _rank, args=(size, configs, ports, str(folder)), nprocs=size
    )
    ranks = [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(size)]
    batch = random_batch(LENGTHS)
    split = split_by_work(batch, size)
    joined = dict(ranks[0])
    for name in configs:
        for key in {"log_probs", "ref_log_probs", "values"} & set(joined[name]):
            joined[name][key] = join_tokens([r[name][key] for r in ranks], split, batch)
    return joined


def _rank(rank: int, size: int, configs: dict[str, Config], ports: list[int], folder: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    found = {n: play(c, rank, size, p) for (n, c), p in zip(configs.items(), ports, strict=True)}
    torch.save(found, Path(folder) / f"rank{rank}.pt")


def check(report: Report) -> None:
    """Every kind and offload on one rank, and where there are two cards (or none) on two."""
    model = write_model(report.folder / "model", "tiny")
    plain = small_run(model, "cpu")
    expected = {kind: play(with_options(plain, KINDS[kind])) for kind in KINDS}
    sizes = [1] if report.on_card and torch.cuda.device_count() < 2 else [1, 2]
    pairs = PAIRS if report.on_card else [p for p in PAIRS if p[1] == "none"]  # no effect there
    for size in sizes:
        config = config_of(model, report.device, size)
        cases = {f"{k}_{o}_{size}": with_options(config, KINDS[k] | OFFLOADS[o]) for k, o in pairs}
        run_cases(report, cases, size, lambda n, got: compare(report, n, got, expected))
    halves(report, model, expected)


def config_of(model: str, device: str, size: int, dtype: str = "float32") -> Config:
    """Other micro-batches than the reference's: sums in another order must come to the same."""
    budget = {"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 20}
    return small_run(model, device, dtype, trainer__n_gpus_per_node=size, **budget)


def run_cases(
    report: Report, cases: dict[str, Config], size: int, judge: Callable[[str, Answers], None]
) -> None:
    """One rank plays case after case and outlives a failure; several play all of them at once."""
    groups = [{n: c} for n, c in cases.items()] if size == 1 else [cases]
    for group in groups:
        with report.part(", ".join(group) if size == 1 else f"{size} ranks"):
            for name, got in play_ranks(group, size, report.folder).items():
                judge(name, got)


def compare(report: Report, name: str, got: Answers, expected: dict[str, Answers]) -> None:
    """Log-probs and values by their largest error, norms and weights by their relative one."""
    want = expected[name.rsplit("_", 2)[0]]
    columns = [key for key in ("log_probs", "ref_log_probs", "values") if key in want]
    column = max(float((got[key] - want[key]).abs().max()) for key in columns)
    norms = zip(got["norms"], want["norms"], strict=True)
    norm = max(abs(a - b) / b for a, b in norms)
    moved = float((want["weights"] - want["start"]).norm() / want["start"].norm())
    weight = float((got["weights"] - want["weights"]).norm() / want["weights"].norm())
    report.expect(f"{name}_columns", column, below=TOLERANCE)
    report.expect(f"{name}_grad_norm", norm, below=TOLERANCE)
    report.expect(f"{name}_weights", weight, below=TOLERANCE)
    if moved < 100 * TOLERANCE:
        report.fail(f"{name}: the weights moved by {moved:.1e} only, which proves nothing")


def halves(report: Report, model: str, expected: dict[str, Answers]) -> None:
    """16-bit computing: near float32, no more can be said of random weights."""
    batch, want = random_batch(LENGTHS), expected["grpo"]
    for dtype in ("bfloat16", "float16"):
        with report.part(dtype), joined(config_of(model, report.device, 1, dtype)) as worker:
            error = float((worker.actor.log_probs(batch) - want["log_probs"]).abs().mean())
            report.expect(f"{dtype}_log_probs", error, below=0.05)
            tries = (worker.actor.update(batch) for _ in range(MOST_TRIES))
            norm = next(m["actor/grad_norm"] for m in tries if "actor/grad_norm" in m)
            report.expect(f"{dtype}_grad_norm", abs(norm / want["norms"][0] - 1), below=0.1)
