"""vLLM on random weights: seeds, log-probs against the trainer's, reload, sleep, adapters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.trainer import joined
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.config import Config
from verl.rollout.vllm_engine import VllmEngine
from verl.training.worker import TrainerWorker
from verl.types import (
    Origin,
    Prompt,
    Sampling,
    Segment,
    TokenBatch,
    Trajectory,
    start_trajectory,
)

NUM_PROMPTS = 16
SHORT = 12
"""Tokens of a prompt below a cache block: nothing of it is found in a cache the second time."""
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-3}
"""Mean difference between the engine's log-probs and the trainer's."""
NAPS = 5
GROWTH_MIB = 64.0
LORA_RANK = 8
MIB = 2**20


def eager(report: Report) -> None:
    """Without graphs, in bfloat16."""
    plain(report, "bfloat16", is_eager=True)


def graphs(report: Report) -> None:
    """As training runs it: compiled, with graphs."""
    report.need_card("there are no CUDA graphs on a CPU")
    plain(report, "bfloat16", is_eager=False)


def float32(report: Report) -> None:
    """Where rounding hides nothing."""
    plain(report, "float32", is_eager=True)


@dataclass
class Played:
    """What an engine generated, by what it did before, and the device memory it held."""

    dialogues: dict[str, list[Trajectory]] = field(default_factory=dict)
    asleep: list[float] = field(default_factory=list)
    awake: list[float] = field(default_factory=list)


def plain(report: Report, dtype: str, is_eager: bool) -> None:
    """All weights: as started, reloaded there and back, and after naps."""
    shape = "0.5B" if report.on_card else "tiny"
    folders = [
        write_model(report.folder / name, shape, seed, report.device, dtype)
        for seed, name in enumerate("ab")
    ]
    config = options(folders[0], report.device, dtype, is_eager)
    played = asyncio.run(play(report, config, folders))
    if report.on_card:
        judge_naps(report, played)
    else:
        report.record("naps", "skipped: an engine does not sleep on a CPU")
    of_a = {name: d for name, d in played.dialogues.items() if name != "reloaded"}
    judge(report, config, of_a, played.dialogues["reloaded"])
    other = options(folders[1], report.device, dtype, is_eager)
    judge(report, other, {"reloaded": played.dialogues["reloaded"]}, played.dialogues["back"])


def options(model: str, device: str, dtype: str, is_eager: bool, lora_rank: int = 0) -> Config:
    """A run whose engine takes a third of the card."""
    return small_run(
        model, device, dtype,
        data__max_prompt_length=256, data__max_response_length=64,
        actor_rollout_ref__rollout__dtype=dtype, actor_rollout_ref__rollout__cpu_kv_cache_gib=1,
        actor_rollout_ref__rollout__enforce_eager=is_eager,
        actor_rollout_ref__rollout__gpu_memory_utilization=0.3,
        actor_rollout_ref__rollout__merge_adapter=False,
        actor_rollout_ref__model__lora_rank=lora_rank,
    )  # fmt: skip


async def start_engine(config: Config) -> VllmEngine:
    """An engine as a replica starts it; in Ray's actors vLLM spawns its core too."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine = VllmEngine.from_config(config, 0)
    await engine.start()
    return engine


async def play(report: Report, config: Config, folders: Sequence[str]) -> Played:
    """Everything that is asked of the engine; it is gone afterwards."""
    engine, played = await start_engine(config), Played()
    try:
        await judge_seeds(report, engine)
        played.dialogues["started"] = await generate(engine, range(NUM_PROMPTS))
        for version, name in enumerate(("reloaded", "back"), start=1):
            await engine.update_weights(folders[version % 2], version)
            played.dialogues[name] = await generate(engine, range(NUM_PROMPTS))
        for nap in range(NAPS if report.on_card else 0):
            await engine.sleep()
            played.asleep.append(used_mib())
            await engine.wake_up()
            await engine.update_weights(folders[0], 3 + nap)
            played.dialogues["woken"] = await generate(engine, range(NUM_PROMPTS))
            played.awake.append(used_mib())
        return played
    finally:
        await engine.shutdown()


async def generate(engine: VllmEngine, seeds: Sequence[int]) -> list[Trajectory]:
    """Prompts of different lengths at once, a seed each."""
    return list(await asyncio.gather(*(one(engine, s, SHORT + 13 * s, s) for s in seeds)))


async def one(engine: VllmEngine, prompt: int, length: int, seed: int) -> Trajectory:
    """One dialogue of a single turn."""
    ids = tuple((31 * prompt + 7 * i * i) % 250 for i in range(length))
    done = start_trajectory(Prompt(f"p#{prompt}", ids, "check", ("x",)), seed=seed)
    got = await engine.generate(ids, Sampling(max_tokens=48, seed=seed))
    done.segments.append(Segment(Origin.POLICY, got.ids, got.text, got.log_probs))
    return done


async def judge_seeds(report: Report, engine: VllmEngine) -> None:
    """One request at a time: a seed repeats its tokens, another one samples others."""
    first = [(await one(engine, 0, SHORT, seed)).ids for seed in range(4)]
    again = [(await one(engine, 0, SHORT, seed)).ids for seed in range(4)]
    report.expect("same_seed_same_tokens", first == again, equal=True)
    report.expect("distinct_of_4_seeds", len({tuple(ids) for ids in first}), equal=4)


def judge(
    report: Report, config: Config, dialogues: dict[str, list[Trajectory]], others: list[Trajectory]
) -> None:
    """The log-probs of `dialogues` are the trainer's with these weights; those of `others` not."""
    tolerance = TOLERANCES[config.trainer.compute_dtype]
    with joined(config) as worker:
        for name, found in dialogues.items():
            mean, most = gap(worker, found)
            report.expect(f"{name}_log_probs_mean", mean, below=tolerance)
            report.record(f"{name}_log_probs_max", most)
        report.expect("other_weights_mean", gap(worker, others)[0], above=5 * tolerance)


def gap(worker: TrainerWorker, dialogues: Sequence[Trajectory]) -> tuple[float, float]:
    """Mean and largest difference between the engine's log-probs and the trainer's."""
    batch = TokenBatch.from_trajectories(dialogues)
    differences = worker.actor.log_probs(batch) - batch.tokens["rollout_log_probs"]
    found = differences[batch.tokens["policy_mask"]].abs()
    return float(found.mean()), float(found.max())


def judge_naps(report: Report, played: Played) -> None:
    """Device memory asleep and awake: the same each time."""
    for name, used in (("asleep", played.asleep), ("awake", played.awake)):
        report.record(f"{name}_mib", [round(x) for x in used])
        report.expect(f"{name}_growth_mib", used[-1] - used[0], below=GROWTH_MIB)
    freed = played.awake[-1] - played.asleep[-1]
    report.expect("freed_by_sleep_mib", freed, above=GROWTH_MIB)


def used_mib() -> float:
    """Memory of the card that anybody holds."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def adapter(report: Report) -> None:
    """The engine with an adapter that a rank has trained, over one base."""
    dtype = "bfloat16" if report.on_card else "float32"
    shape = "0.5B" if report.on_card else "tiny"
    model = write_model(report.folder / "model", shape, 0, report.device, dtype)
    config = options(model, report.device, dtype, is_eager=True, lora_rank=LORA_RANK)
    config.actor_rollout_ref.actor.optim.lr = 3e-2
    with joined(config) as worker:
        for seed in range(3):
            worker.actor.update(random_batch([64] * 8, seed=seed))
        worker.save_policy(report.folder / "adapter", is_adapter=True)
        base, adapted = asyncio.run(play_adapter(config, report.folder / "adapter"))
        tolerance = TOLERANCES[dtype]
        report.expect("adapted_log_probs_mean", gap(worker, adapted)[0], below=tolerance)
        report.expect("base_log_probs_mean", gap(worker, base)[0], above=5 * tolerance)


async def play_adapter(config: Config, folder: Path) -> tuple[list[Trajectory], list[Trajectory]]:
    """Dialogues without the adapter and with it."""
    engine = await start_engine(config)
    try:
        base = await generate(engine, range(NUM_PROMPTS))
        await engine.update_weights(str(folder), 1, is_adapter=True)
        return base, await generate(engine, range(NUM_PROMPTS))
    finally:
        await engine.shutdown()
