"""Real shapes with random weights: how fast a rank updates, and the memory that takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.trainer import joined
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.config import Config
from verl.machine import Machine
from verl.model_shape import ModelShape, read_shape
from verl.monitor.flops import ModelFlops
from verl.preflight.memory.estimate import Setting, rank_needs
from verl.preflight.memory.needs import CONTEXT, Memory, Phase
from verl.training.node_folder import new_path
from verl.types import TokenBatch

CASES = (("1.5B", False), ("3B", False), ("3B", True))
"""Shapes, and whether parameters and optimizer wait on the host, as the recipes have it."""
LENGTH, COUNT, BUDGET = 1500, 32, 16384
GIB = 2**30
PASSES = {"log_probs": (Phase.LOG_PROBS,), "update": (Phase.UPDATE_ACTOR, Phase.STEP_ACTOR)}
RATIO = (0.8, 1.15)
"""Of the measured peak by the estimate; above 1 by more, runs die that were let through."""


def check(report: Report) -> None:
    """Every case that this card has the memory for; on a CPU, of which time and memory say nothing,
    a tiny one that tries the check."""
    cases, length = (CASES, LENGTH) if report.on_card else ([("tiny", False)], LENGTH // 2)
    for shape, offload in cases:
        with report.part(f"{shape}{' offloaded' if offload else ''}"):
            measure(report, shape, offload, length)


def measure(report: Report, shape: str, offload: bool, length: int) -> None:
    """One rank of GRPO in bfloat16 with recomputation: time, memory, hand-over."""
    name = f"{shape}_offloaded" if offload else shape
    folder = report.folder / shape
    if not folder.exists():
        write_model(folder, shape, 0, report.device, "bfloat16")
    config = run_of(str(folder), report.device, offload, length)
    facts = read_shape(str(folder))
    assert facts is not None
    expected = estimates(config, facts)
    if report.on_card:
        torch.cuda.empty_cache()
        free, needed = torch.cuda.mem_get_info()[0], max(expected.values()) + CONTEXT
        if needed > free:
            report.record(name, f"skipped: {needed / GIB:.0f} GiB needed, {free / GIB:.0f} free")
            return
    batch, flops = random_batch([length] * COUNT, facts.vocab), ModelFlops(facts)
    work = batch.lengths.tolist(), int(batch.tokens["policy_mask"].sum())
    began = time.monotonic()
    with joined(config) as worker:
        report.record(f"{name}_load_s", time.monotonic() - began)
        for what, call, count in (
            ("log_probs", worker.actor.log_probs, flops.forward),
            ("update", worker.actor.update, flops.update),
        ):
            one_pass(report, f"{name}_{what}", call, batch, count(*work), expected[what])
        began = time.monotonic()
        worker.share_policy(new_path(), 1, [], "bfloat16", is_adapter=False)
        report.record(f"{name}_hand_over_s", time.monotonic() - began)
        worker.shutdown()


def run_of(model: str, device: str, offload: bool, length: int) -> Config:
    """One mini-batch a step, of `COUNT` trajectories."""
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
    """Device bytes of a rank by `verl.preflight.memory`, its context apart, in each pass."""
    setting = Setting(shape, shape, on_gpu=True, machine=Machine.now(with_devices=False))
    held = [n for n in rank_needs(config, setting) if n.memory is Memory.DEVICE]
    return {
        what: max(sum(n.bytes for n in held if phase in n.phases) for phase in phases)
        for what, phases in PASSES.items()
    }


def one_pass(
    report: Report,
    name: str,
    call: Callable[[TokenBatch], Any],
    batch: TokenBatch,
    flops: int,
    estimate: int,
) -> None:
    """The second and third call in seconds each; the peak of what torch allocated."""
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
