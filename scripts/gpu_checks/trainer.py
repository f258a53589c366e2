"""Compares training ranks on the device with a rank on the CPU."""

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
from verl.preflight.undecided import with_options
from verl.training.worker import TrainerWorker

LENGTHS = [14, 9, 17, 6, 11]
BATCHES = (LENGTHS, [12], [8, 8, 20])
"""Sequence lengths of three updates; in the second, one of two ranks has no sequence."""
TOLERANCE = 1e-4
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
Results = dict[str, Any]


@contextmanager
def training_rank(
    config: Config, rank: int = 0, size: int = 1, port: int | None = None
) -> Iterator[TrainerWorker]:
    """Create a rank in this process; its process group is destroyed afterwards."""
    try:
        yield TrainerWorker(config, rank, size, "127.0.0.1", port or free_port(), 10)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def play(config: Config, rank: int = 0, size: int = 1, port: int | None = None) -> Results:
    """Run a rank's passes and three updates; returns their results."""
    with training_rank(config, rank, size, port) as worker:
        first = split_by_work(random_batch(LENGTHS), size).shards[rank]
        results: Results = {"log_probs": worker.actor.log_probs(first), "norms": []}
        assert worker.reference is not None
        results["ref_log_probs"] = worker.reference.log_probs(first)
        results["start"] = weights(worker)
        for seed, lengths in enumerate(BATCHES):
            shard = split_by_work(random_batch(lengths, seed=seed), size).shards[rank]
            results["norms"].append(worker.actor.update(shard)["actor/grad_norm"])
            if worker.critic is not None:
                results["norms"].append(worker.critic.update(shard)["critic/grad_norm"])
        if worker.critic is not None:
            results["values"] = worker.critic.values(first)
        return results | {"weights": weights(worker)}


def weights(worker: TrainerWorker) -> Tensor:
    """Return all trained weights of policy and critic as one float64 vector."""
    parameters = [model.full_trained_parameters() for model in worker.models.values()]
    tensors = [x for named in parameters for x in named.values()]
    return torch.cat([x.detach().cpu().double().flatten() for x in tensors])


def play_ranks(configs: dict[str, Config], size: int, folder: Path) -> dict[str, Results]:
    """Run `play` on `size` ranks, each with its own process and card; joins per-token results."""
    if size == 1:
        return {name: play(config) for name, config in configs.items()}
    ports = [free_port() for _ in configs]
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        _rank, args=(size, configs, ports, str(folder)), nprocs=size
    )
    ranks = [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(size)]
    batch = random_batch(LENGTHS)
    split = split_by_work(batch, size)
    combined = dict(ranks[0])
    for name in configs:
        for key in {"log_probs", "ref_log_probs", "values"} & set(combined[name]):
            combined[name][key] = join_tokens([r[name][key] for r in ranks], split, batch)
    return combined


def _rank(rank: int, size: int, configs: dict[str, Config], ports: list[int], folder: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    results = {n: play(c, rank, size, p) for (n, c), p in zip(configs.items(), ports, strict=True)}
    torch.save(results, Path(folder) / f"rank{rank}.pt")


def check(report: Report) -> None:
    """Check every kind and offload on one rank, and on two ranks with two cards or on CPU."""
    model = write_model(report.folder / "model", "tiny")
    plain = small_run(model, "cpu")
    expected = {kind: play(with_options(plain, KINDS[kind])) for kind in KINDS}
    sizes = [1] if report.on_card and torch.cuda.device_count() < 2 else [1, 2]
    pairs = PAIRS if report.on_card else [p for p in PAIRS if p[1] == "none"]  # no effect on CPU
    for size in sizes:
        config = config_of(model, report.device, size)
        cases = {f"{k}_{o}_{size}": with_options(config, KINDS[k] | OFFLOADS[o]) for k, o in pairs}
        run_cases(report, cases, size, lambda n, got: compare(report, n, got, expected))
    bfloat16(report, model, expected)


def config_of(model: str, device: str, size: int, dtype: str = "float32") -> Config:
    """Return options with other micro-batches than the reference, which must not matter."""
    budget = {"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 20}
    return small_run(model, device, dtype, trainer__n_gpus_per_node=size, **budget)


def run_cases(
    report: Report, cases: dict[str, Config], size: int, check_case: Callable[[str, Results], None]
) -> None:
    """Run and check the cases: on one rank separately, on several ranks all together."""
    groups = [{n: c} for n, c in cases.items()] if size == 1 else [cases]
    for group in groups:
        with report.part(", ".join(group) if size == 1 else f"{size} ranks"):
            for name, got in play_ranks(group, size, report.folder).items():
                check_case(name, got)


def compare(report: Report, name: str, got: Results, expected: dict[str, Results]) -> None:
    """Compare log-probs and values by the largest error, norms and weights by relative error."""
    want = expected[name.rsplit("_", 2)[0]]
    columns = [key for key in ("log_probs", "ref_log_probs", "values") if key in want]
    column = max(float((got[key] - want[key]).abs().max()) for key in columns)
    norm = max(abs(a - b) / b for a, b in zip(got["norms"], want["norms"], strict=True))
    moved = float((want["weights"] - want["start"]).norm() / want["start"].norm())
    weight = float((got["weights"] - want["weights"]).norm() / want["weights"].norm())
    report.expect(f"{name}_columns", column, below=TOLERANCE)
    report.expect(f"{name}_grad_norm", norm, below=TOLERANCE)
    report.expect(f"{name}_weights", weight, below=TOLERANCE)
    if moved < 100 * TOLERANCE:
        report.fail(f"{name}: the weights moved by {moved:.1e} only, which proves nothing")


def bfloat16(report: Report, model: str, expected: dict[str, Results]) -> None:
    """Check that its results are near float32; random weights allow no tighter check."""
    batch, want, dtype = random_batch(LENGTHS), expected["grpo"], "bfloat16"
    with report.part(dtype), training_rank(config_of(model, report.device, 1, dtype)) as worker:
        error = float((worker.actor.log_probs(batch) - want["log_probs"]).abs().mean())
        report.expect(f"{dtype}_log_probs", error, below=0.05)
        norm = worker.actor.update(batch)["actor/grad_norm"]
        report.expect(f"{dtype}_grad_norm", abs(norm / want["norms"][0] - 1), below=0.1)
