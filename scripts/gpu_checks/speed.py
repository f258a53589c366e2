"""Measures the speed and memory of a rank on real model shapes with random weights."""

import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.trainer import training_rank
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.batch import TokenBatch
from verl.config import Config
from verl.ext.flops import ModelFlops
from verl.ext.memory.estimate import Setting, rank_needs
from verl.ext.memory.needs import CONTEXT, Memory, Phase
from verl.ext.model_shape import ModelShape, read_shape
from verl.machine import Machine
from verl.weights.node_folder import new_path

CASES = (("1.5B", False), ("3B", False), ("3B", True))
"""Shapes, and whether parameters and optimizer are offloaded, as in the recipes."""
LENGTH, COUNT, BUDGET = 1500, 32, 16384
GIB = 2**30
PASSES = {"log_probs": (Phase.LOG_PROBS,), "update": (Phase.UPDATE_ACTOR, Phase.STEP_ACTOR)}
RATIO = (0.8, 1.15)
"""Allowed ratio of measured peak to estimate; above it, runs that pass the preflight could fail."""


def check(report: Report) -> None:
    """Measure every case that fits the card; on a CPU, only a tiny one, to test the check."""
    cases, length = (CASES, LENGTH) if report.on_card else ([("tiny", False)], LENGTH // 2)
    for shape, offload in cases:
        with report.part(f"{shape}{' offloaded' if offload else ''}"):
            measure(report, shape, offload, length)


def measure(report: Report, shape: str, offload: bool, length: int) -> None:
    """Measure one GRPO rank in bfloat16 with recomputation: time, memory and weight transfer."""
    name = f"{shape}_offloaded" if offload else shape
    folder = report.folder / shape
    if not folder.exists():
        write_model(folder, shape, 0, report.device, "bfloat16")
    config = run_of(str(folder), report.device, offload, length)
    model_shape = read_shape(str(folder))
    assert model_shape is not None
    expected = estimates(config, model_shape)
    if report.on_card:
        torch.cuda.empty_cache()
        free, needed = torch.cuda.mem_get_info()[0], max(expected.values()) + CONTEXT
        if needed > free:
            report.record(name, f"skipped: {needed / GIB:.0f} GiB needed, {free / GIB:.0f} free")
            return
    batch, flops = random_batch([length] * COUNT, model_shape.vocab), ModelFlops(model_shape)
    work = batch.lengths.tolist(), int(batch.tokens["policy_mask"].sum())
    began = time.monotonic()
    with training_rank(config) as worker:
        report.record(f"{name}_load_s", time.monotonic() - began)
        for key, call, count in (
            ("log_probs", worker.actor.log_probs, flops.forward),
            ("update", worker.actor.update, flops.update),
        ):
            measure_pass(report, f"{name}_{key}", call, batch, count(*work), expected[key])
        began = time.monotonic()
        worker.sender.write(str(new_path()), 1, [], "bfloat16")
        report.record(f"{name}_hand_over_s", time.monotonic() - began)
        worker.shutdown()


def run_of(model: str, device: str, offload: bool, length: int) -> Config:
    """Return options with one mini-batch of `COUNT` trajectories per step."""
    fsdp = "actor_rollout_ref__actor__fsdp_config__"
    return small_run(
        model, device, "bfloat16",
        data__train_batch_size=COUNT, data__max_prompt_length=length - 500,
        data__max_response_length=500,
        actor_rollout_ref__model__enable_gradient_checkpointing=True,
        actor_rollout_ref__actor__use_kl_loss=False, actor_rollout_ref__actor__entropy_coeff=0.0,
        actor_rollout_ref__actor__ppo_mini_batch_size=COUNT,
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=BUDGET,
        algorithm__kl_ctrl__kl_coef=0.0,
        **{fsdp + "param_offload": offload, fsdp + "optimizer_offload": offload},
    )  # fmt: skip


def estimates(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return the estimated device bytes of a rank in each pass, without its context."""
    setting = Setting(shape, shape, on_gpu=True, machine=Machine.now(with_devices=False))
    needs = [need for need in rank_needs(config, setting) if need.memory is Memory.DEVICE]
    return {
        name: max(sum(need.bytes for need in needs if phase in need.phases) for phase in phases)
        for name, phases in PASSES.items()
    }


def measure_pass(
    report: Report, name: str, call: Callable[[TokenBatch], Any], batch: TokenBatch,
    flops: int, estimate: int,
) -> None:  # fmt: skip
    """Record seconds per call, after a warm-up call, and the peak of torch's allocations."""
    call(batch)
    if report.on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    for _ in range(2):
        call(batch)
    if report.on_card:
        torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / 2
    report.record(f"{name}_s", seconds)
    report.record(f"{name}_tokens_per_s", round(batch.num_tokens / seconds))
    report.record(f"{name}_tflops", flops / seconds / 1e12)
    report.record(f"{name}_estimate_gib", estimate / GIB)
    if report.on_card:
        peak = torch.cuda.max_memory_allocated()
        report.record(f"{name}_peak_gib", peak / GIB)
        report.expect(f"{name}_peak_by_estimate", peak / estimate, above=RATIO[0], below=RATIO[1])
