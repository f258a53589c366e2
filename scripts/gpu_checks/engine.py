"""Checks vLLM on random weights: seeds, log-probs, weight updates, sleep and adapters."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.trainer import training_rank
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.batch import TokenBatch
from verl.config import Config
from verl.ext.lora.model import write_adapter
from verl.rollout.vllm_engine import VllmEngine
from verl.training.worker import TrainerWorker
from verl.types import Origin, Prompt, Sampling, Segment, Trajectory, start_trajectory

NUM_PROMPTS = 16
SHORT = 12
"""Prompt tokens, fewer than a cache block, so that a second request finds nothing in the cache."""
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-3}
"""Bounds on the mean difference between the engine's log-probs and the trainer's."""
NUM_SLEEPS = 5
MAX_GROWTH_MIB = 64.0
LORA_RANK = 8
MIB = 2**20


def eager(report: Report) -> None:
    """Check the engine in bfloat16 without CUDA graphs."""
    plain(report, "bfloat16", is_eager=True)


def graphs(report: Report) -> None:
    """Check the engine as training runs it: compiled, with CUDA graphs."""
    report.need_card("there are no CUDA graphs on a CPU")
    plain(report, "bfloat16", is_eager=False)


def float32(report: Report) -> None:
    """Check the engine in float32, where rounding hides nothing."""
    plain(report, "float32", is_eager=True)


@dataclass
class Played:
    """What an engine generated, and the device memory in use."""

    dialogues: dict[str, list[Trajectory]] = field(default_factory=dict)
    """Dialogues by the engine's state: `started`, `reloaded`, `back`, `woken`."""
    asleep: list[float] = field(default_factory=list)
    """MiB in use in each sleep."""
    awake: list[float] = field(default_factory=list)
    """MiB in use after each sleep."""


def plain(report: Report, dtype: str, is_eager: bool) -> None:
    """Check an engine with whole weights: at start, after two weight updates, and after sleeps."""
    report.need_vllm()
    shape = "0.5B" if report.on_card else "tiny"
    folders = [
        write_model(report.folder / name, shape, seed, report.device, dtype)
        for seed, name in enumerate("ab")
    ]
    config = options(folders[0], report.device, dtype, is_eager)
    played = asyncio.run(play(report, config, folders))
    if report.on_card:
        check_sleeps(report, played)
    else:
        report.record("naps", "skipped: an engine does not sleep on a CPU")
    with_first = {name: d for name, d in played.dialogues.items() if name != "reloaded"}
    check_log_probs(report, config, with_first, played.dialogues["reloaded"])
    other = options(folders[1], report.device, dtype, is_eager)
    with_second = {"reloaded": played.dialogues["reloaded"]}
    check_log_probs(report, other, with_second, played.dialogues["back"])


def options(model: str, device: str, dtype: str, is_eager: bool, lora_rank: int = 0) -> Config:
    """Return the options of a run whose engine takes 0.3 of the card's memory."""
    return small_run(
        model, device, dtype,
        data__max_prompt_length=256, data__max_response_length=64,
        actor_rollout_ref__rollout__dtype=dtype, actor_rollout_ref__rollout__cpu_kv_cache_gib=1,
        actor_rollout_ref__rollout__engine_kwargs={"enforce_eager": is_eager},
        actor_rollout_ref__rollout__gpu_memory_utilization=0.3,
        actor_rollout_ref__rollout__merge_adapter=False,
        actor_rollout_ref__model__lora_rank=lora_rank,
    )  # fmt: skip


async def start_engine(config: Config) -> VllmEngine:
    """Start an engine as a replica does; in Ray actors, too, vLLM spawns its core."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine = VllmEngine.from_config(config, 0)
    await engine.start()
    return engine


async def play(report: Report, config: Config, folders: Sequence[str]) -> Played:
    """Start an engine, run all requests, weight updates and sleeps, and shut it down."""
    engine, played = await start_engine(config), Played()
    try:
        await check_seeds(report, engine)
        played.dialogues["started"] = await generate(engine, range(NUM_PROMPTS))
        for version, name in enumerate(("reloaded", "back"), start=1):
            await engine.update_weights(folders[version % 2], version)
            played.dialogues[name] = await generate(engine, range(NUM_PROMPTS))
        for i in range(NUM_SLEEPS if report.on_card else 0):
            await engine.sleep()
            played.asleep.append(used_mib())
            await engine.wake_up()
            await engine.update_weights(folders[0], 3 + i)
            played.dialogues["woken"] = await generate(engine, range(NUM_PROMPTS))
            played.awake.append(used_mib())
        return played
    finally:
        await engine.shutdown()


async def generate(engine: VllmEngine, seeds: Sequence[int]) -> list[Trajectory]:
    """Generate from prompts of different lengths at the same time, one per seed."""
    requests = (dialogue(engine, seed, SHORT + 13 * seed, seed) for seed in seeds)
    return list(await asyncio.gather(*requests))


async def dialogue(engine: VllmEngine, prompt: int, length: int, seed: int) -> Trajectory:
    """Generate a dialogue of a single turn."""
    ids = tuple((31 * prompt + 7 * i * i) % 250 for i in range(length))
    trajectory = start_trajectory(Prompt(f"p#{prompt}", ids, "check", ("x",)), seed=seed)
    turn = await engine.generate(ids, Sampling(max_tokens=48, seed=seed))
    trajectory.segments.append(Segment(Origin.POLICY, turn.ids, turn.text, turn.log_probs))
    return trajectory


async def check_seeds(report: Report, engine: VllmEngine) -> None:
    """Check, one request at a time, that equal seeds repeat tokens and others do not."""
    first = [(await dialogue(engine, 0, SHORT, seed)).ids for seed in range(4)]
    again = [(await dialogue(engine, 0, SHORT, seed)).ids for seed in range(4)]
    report.expect("same_seed_same_tokens", first == again, equal=True)
    report.expect("distinct_of_4_seeds", len({tuple(ids) for ids in first}), equal=4)


def check_log_probs(
    report: Report, config: Config, dialogues: dict[str, list[Trajectory]], others: list[Trajectory]
) -> None:
    """Check that the log-probs of `dialogues` match the trainer's with the weights of `config`.

    Those of `others`, which were sampled with other weights, must not match.
    """
    tolerance = TOLERANCES[config.trainer.compute_dtype]
    with training_rank(config) as worker:
        for name, trajectories in dialogues.items():
            mean, largest = gap(worker, trajectories)
            report.expect(f"{name}_log_probs_mean", mean, below=tolerance)
            report.record(f"{name}_log_probs_max", largest)
        report.expect("other_weights_mean", gap(worker, others)[0], above=5 * tolerance)


def gap(worker: TrainerWorker, dialogues: Sequence[Trajectory]) -> tuple[float, float]:
    """Return the mean and largest difference between the engine's and the trainer's log-probs."""
    batch = TokenBatch.from_trajectories(dialogues)
    differences = worker.actor.log_probs(batch) - batch.tokens["rollout_log_probs"]
    errors = differences[batch.tokens["policy_mask"]].abs()
    return float(errors.mean()), float(errors.max())


def check_sleeps(report: Report, played: Played) -> None:
    """Check that device memory, asleep and awake, does not grow, and that sleep frees memory."""
    for name, used in (("asleep", played.asleep), ("awake", played.awake)):
        report.record(f"{name}_mib", [round(x) for x in used])
        report.expect(f"{name}_growth_mib", used[-1] - used[0], below=MAX_GROWTH_MIB)
    freed = played.awake[-1] - played.asleep[-1]
    report.expect("freed_by_sleep_mib", freed, above=MAX_GROWTH_MIB)


def used_mib() -> float:
    """Return the device memory in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def adapter(report: Report) -> None:
    """Check an engine that loads an adapter trained by a rank."""
    report.need_vllm()
    dtype = "bfloat16" if report.on_card else "float32"
    shape = "0.5B" if report.on_card else "tiny"
    model = write_model(report.folder / "model", shape, 0, report.device, dtype)
    config = options(model, report.device, dtype, is_eager=True, lora_rank=LORA_RANK)
    config.actor_rollout_ref.actor.optim.lr = 3e-2
    with training_rank(config) as worker:
        for seed in range(3):
            worker.actor.update(random_batch([64] * 8, seed=seed))
        write_adapter(worker.actor.model, report.folder / "adapter")
        base, adapted = asyncio.run(play_adapter(config, report.folder / "adapter"))
        tolerance = TOLERANCES[dtype]
        report.expect("adapted_log_probs_mean", gap(worker, adapted)[0], below=tolerance)
        report.expect("base_log_probs_mean", gap(worker, base)[0], above=5 * tolerance)


async def play_adapter(config: Config, folder: Path) -> tuple[list[Trajectory], list[Trajectory]]:
    """Generate dialogues without and with the adapter."""
    engine = await start_engine(config)
    try:
        base = await generate(engine, range(NUM_PROMPTS))
        await engine.update_weights(str(folder), 1)
        return base, await generate(engine, range(NUM_PROMPTS))
    finally:
        await engine.shutdown()
