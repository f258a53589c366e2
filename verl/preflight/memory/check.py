"""The run's memory against this machine's, before anything is loaded.

Where the options leave it open, the estimate chooses what waits on the host between uses, and what
the room that is left on the devices is spent on. What cannot fit is refused, what is close is
warned of, both with the options that need less. What other nodes of a cluster have is not seen from
here: on a cluster nothing is refused.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.errors import ResourceError, UserError
from verl.machine import ENLARGE_SHARED_MEMORY, Machine, format_bytes
from verl.model_shape import read_shape
from verl.preflight.memory.estimate import (
    REFUSE_ABOVE,
    WARN_ABOVE,
    Estimate,
    Setting,
    Shortage,
    estimate,
    free_memory,
)
from verl.preflight.memory.needs import AWAKE, Memory, has_critic
from verl.training.devices import device_type, dtype_name, is_surely_cpu, resolve_dtype
from verl.training.kernels import kernel_problems

logger = logging.getLogger(__name__)

LESS_WORK = ("a smaller ppo_max_token_len_per_gpu (actor, critic), "
             "model.enable_gradient_checkpointing=true")  # fmt: skip
LESS_HELD = ("fsdp_config.param_offload and optimizer_offload=true (actor, ref, critic), "
             "model.lora_rank=32, more trainer.n_gpus_per_node or nnodes")  # fmt: skip
HINTS = {
    "cache": "a larger rollout.gpu_memory_utilization or tensor_model_parallel_size",
    "awake": "a smaller rollout.gpu_memory_utilization, a larger "
             f"rollout.tensor_model_parallel_size, {LESS_HELD}",
    "asleep": f"{LESS_WORK}, {LESS_HELD}",
    Memory.CRITIC: "more critic.n_gpus_per_node, a smaller critic.ppo_max_token_len_per_gpu, "
              "critic.model.fsdp_config.param_offload=true, critic.model.lora_rank=32",
    Memory.ENGINE: "a smaller rollout.gpu_memory_utilization",
    Memory.SHARED: ENLARGE_SHARED_MEMORY,
    "host": "fsdp_config.param_offload and optimizer_offload=false, model.lora_rank=32, more nodes",
    "cpu": "actor_rollout_ref.rollout.cpu_kv_cache_gib=1, trainer.n_gpus_per_node=1, "
           f"model.lora_rank=32, {LESS_WORK}",
}  # fmt: skip
"""Options that lower what is too much."""
ACTOR = "actor_rollout_ref.actor.fsdp_config"
REFERENCE = "actor_rollout_ref.ref.fsdp_config"
CRITIC = "critic.model.fsdp_config"
OFFLOAD_OPTIONS = {
    f"{REFERENCE}.param_offload": "reference's weights",
    f"{CRITIC}.optimizer_offload": "critic's optimizer state",
    f"{ACTOR}.optimizer_offload": "actor's optimizer state",
    f"{CRITIC}.param_offload": "critic's weights, gradients and optimizer state",
    f"{ACTOR}.param_offload": "actor's weights, gradients and optimizer state",
}
"""What may wait on the host, by rising cost of a step: each costs more than all before it.

The reference's weights are copied to the device as they are used, optimizer state to and fro at
each update; of a model trained from the host, the CPU adds up gradients and computes the update.
"""
OFFLOAD_KEYS = (*OFFLOAD_OPTIONS, f"{REFERENCE}.optimizer_offload")
"""Every option of this kind; a reference has no optimizer."""

MEMORY_FOR_SPEED: dict[str, dict[bool | str, str]] = {
    **{
        f"{section}.enable_gradient_checkpointing": {
            False: f"the {name}'s activations are kept",
            SELECTIVE: f"the {name}'s activations are kept, but for what is cheap to recompute",
        }
        for section, name in (("actor_rollout_ref.model", "actor"), ("critic.model", "critic"))
    },
    f"{ACTOR}.reshard_each": {False: "the actor's weights and gradients stay whole in an update"},
    f"{CRITIC}.reshard_each": {False: "the critic's weights and gradients stay whole in an update"},
}
"""Options, by the time that they save, with the values that save it and take memory, most first."""


def read_setting(config: Config) -> Setting | None:
    """This machine and the models; None where nothing is to be estimated, or nothing can be."""
    if config.trainer.memory_preflight == "off":
        return None
    policy = read_shape(config.actor_rollout_ref.model.path)
    critic = read_shape(config.critic_path)
    if policy is None or critic is None:
        logger.info("memory: not estimated: it is for dense models in a folder or the hub's cache")
        return None
    on_gpu = device_type(config.trainer.device) == "cuda"
    machine = Machine.now(with_devices=on_gpu)
    dtype = resolve_dtype(config.trainer.compute_dtype, torch.device("cuda" if on_gpu else "cpu"))
    setting = Setting(policy, critic, on_gpu, machine, dtype_name(dtype))
    try:
        estimate(fill_undecided(config), setting)
    except (RuntimeError, TypeError, AttributeError) as error:
        # Model code that asks tensors for their values cannot be tried on tensors without any.
        logger.info("memory: not estimated: the model cannot be tried on fake tensors (%s)", error)
        return None
    return setting


def decide_memory(config: Config, setting: Setting | None) -> Config:
    """The options with every null decided: what waits on the host, and what the room that is then
    left on GPUs is spent on; where it is not estimated, nothing is."""
    keys, chosen = undecided(config, MEMORY_FOR_SPEED), decide_offload(config, setting)
    if keys and setting is not None and setting.machine.devices:
        chosen = spend_free_memory(chosen, setting, keys)
        values = [(MEMORY_FOR_SPEED[key], attrgetter(key)(chosen)) for key in keys]
        kept = [words[value] for words, value in values if value in words]
        logger.info("memory that is left: %s", ", ".join(kept) or "too little to save time with")
    return chosen


def decide_offload(config: Config, setting: Setting | None) -> Config:
    """The options with every null of `*_offload` decided; one line of the log says how, and why.

    On CPU it is false. Where this driver cannot tell what the GPUs hold, it is true, which is slow
    but never the reason that a run does not fit.
    """
    keys = undecided_offloads(config)
    if not keys or is_surely_cpu(config.trainer.device):
        return fill_undecided(config)
    seen = setting if setting is not None and setting.machine.devices else None
    chosen = offload_everything(config) if seen is None else choose_offload(config, seen)
    parts = [OFFLOAD_OPTIONS[key] for key in keys if attrgetter(key)(chosen)]
    line = f"offload to the host: {', '.join(parts) or 'nothing'}"
    if seen is None:
        logger.warning("%s, whether or not the GPUs have room for it, since their memory was not "
                       "estimated; to keep it on them: OFFLOAD=false (train_*.sh), or %s=false",
                       line, "=false ".join(keys))  # fmt: skip
        return chosen
    without, needed = (
        peak_rank_bytes(estimate(one, seen)) for one in (fill_undecided(config), chosen)
    )
    free = format_bytes(free_memory(seen.machine)[Memory.DEVICE])
    otherwise = "" if needed == without else f", and would need {format_bytes(without)} otherwise"
    logger.info("%s; each GPU needs %s of %s free%s", line, format_bytes(needed), free, otherwise)
    return chosen


def memory_problems(config: Config, setting: Setting | None) -> Iterator[UserError]:
    """ResourceError where the run cannot fit; the estimate, and what is close, are logged."""
    if setting is None:
        return
    found, machine = estimate(config, setting), setting.machine
    logger.info("memory needed and free:\n%s", table(found, machine))
    if setting.on_gpu and not machine.devices:
        return  # the check of devices says so
    refuses = config.trainer.memory_preflight == "refuse" and not os.environ.get("RAY_ADDRESS")
    if refuses and found.shortages(config, machine, REFUSE_ABOVE):
        yield ResourceError(verdict("too small", config, machine, found, REFUSE_ABOVE))
    elif found.shortages(config, machine, WARN_ABOVE):
        logger.warning("%s", verdict("close", config, machine, found, WARN_ABOVE))


def verdict(word: str, config: Config, machine: Machine, found: Estimate, limit: float) -> str:
    """What is short by `limit`, and the options that need less."""
    head = (f"memory: this machine is {word} (refused above {REFUSE_ABOVE:.0%} of what is free; "
            "trainer.memory_preflight=warn starts it):")  # fmt: skip
    shortages = found.shortages(config, machine, limit)
    lines = [f"  {shortage_line(s, found)}; to need less: {hint(s, found)}" for s in shortages]
    return "\n".join([head, *lines])


def shortage_line(short: Shortage, found: Estimate) -> str:
    """What is too small, by how much, and what needs it."""
    phase = found.peak_phase(short.memory)
    needs = f"{short.memory} needs about {format_bytes(short.needed)}"
    if short.cause != phase.value:
        return f"{needs} for {short.cause}, but the engine's share is {format_bytes(short.free)}"
    largest = found.needs_in(short.memory, phase)[:5]
    parts = ", ".join(f"{need.name} {format_bytes(need.bytes)}" for need in largest)
    return f"{needs} in {short.cause} ({parts}), but {format_bytes(short.free)} is free"


def hint(short: Shortage, found: Estimate) -> str:
    """Options that lower what is too much there in that phase."""
    if short.cause != found.peak_phase(short.memory):
        return HINTS["cache"]
    if short.memory is Memory.HOST:
        return HINTS["host" if found.peak_bytes(Memory.DEVICE) else "cpu"]
    if short.memory is Memory.DEVICE:
        return HINTS["awake" if short.cause in AWAKE else "asleep"]
    return HINTS[short.memory]


def table(found: Estimate, machine: Machine) -> str:
    """A line per need in the worst phase of each memory, and a line that adds them up."""
    free, lines = free_memory(machine), []
    width = max(len(memory) for memory in Memory if found.peak_bytes(memory))
    for memory in Memory:
        phase = found.peak_phase(memory)
        needs = found.needs_in(memory, phase)
        if not needs:
            continue
        lines += [
            f"  {memory:{width}} {format_bytes(need.bytes):>9}  {need.name}" for need in needs
        ]
        of = f" of {format_bytes(free[memory])} free" if memory in free else ""
        total = format_bytes(found.total(memory, phase))
        lines.append(f"  {memory:{width}} {total:>9}  needed{of}, in {phase}")
    if found.engine is not None:
        tokens, cache = found.engine.cached_tokens, format_bytes(max(0, found.engine.cache))
        lines.append(f"  {found.engine.memory:{width}} {cache:>9}  of the engine's share is "
                     f"KV cache, for {tokens:,} tokens")  # fmt: skip
    return "\n".join(lines)


def with_options(config: Config, change: Mapping[str, Any]) -> Config:
    """A copy of the options with some of them set, by their dotted names."""
    result = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(result), name, value)
    return result


def undecided(config: Config, keys: Iterable[str] = OFFLOAD_KEYS) -> list[str]:
    """Those of the options that are null, in order."""
    return [key for key in keys if attrgetter(key)(config) is None]


def undecided_offloads(config: Config) -> list[str]:
    """Those of them that have an effect: the parts exist, and have weights of their own."""
    parts = [ACTOR]
    if config.needs_reference and not config.actor_rollout_ref.model.has_adapter:
        parts.append(REFERENCE)
    if has_critic(config) and not config.shares_base:
        parts.append(CRITIC)
    return [
        key for key in undecided(config) if key in OFFLOAD_OPTIONS and key.startswith(tuple(parts))
    ]


def fill_undecided(config: Config, chosen: Mapping[str, Any] | None = None) -> Config:
    """A copy with `chosen` and without nulls: what else is open is false.

    A critic that shares the policy's base goes where that goes.
    """
    result = with_options(config, chosen or {})
    for key in undecided(result):
        twin = key.replace(CRITIC, ACTOR) if config.shares_base else key
        result = with_options(result, {key: bool(attrgetter(twin)(result))})
    return with_options(result, dict.fromkeys(undecided(result, MEMORY_FOR_SPEED), True))


def spend_free_memory(config: Config, setting: Setting, keys: Sequence[str]) -> Config:
    """A copy of settled options; each of `keys` has the first value of `ROOM` for which there is
    room, if any."""
    limit = WARN_ABOVE * free_memory(setting.machine)[Memory.DEVICE]
    for key in keys:
        ways = [with_options(config, {key: value}) for value in MEMORY_FOR_SPEED[key]]
        able = (way for way in ways if not any(kernel_problems(way)))
        fitting = (way for way in able if peak_rank_bytes(estimate(way, setting)) <= limit)
        config = next(fitting, config)
    return config


def offload_everything(config: Config) -> Config:
    """A copy in which all that is open waits on the host."""
    return fill_undecided(config, dict.fromkeys(undecided_offloads(config), True))


def choose_offload(config: Config, setting: Setting) -> Config:
    """The cheapest that the host can hold and that fits each GPU with room to spare.

    Where there is none, the most that the host can hold.
    """
    keys, free = undecided_offloads(config)[::-1], free_memory(setting.machine)
    values = itertools.product((False, True), repeat=len(keys))  # the last, cheapest, varies most
    ways = [fill_undecided(config, dict(zip(keys, way, strict=True))) for way in values]
    needs = [(way, estimate(way, setting)) for way in ways]
    held = [
        (way, found) for way, found in needs if found.peak_bytes(Memory.HOST) <= free[Memory.HOST]
    ]
    limit = WARN_ABOVE * free[Memory.DEVICE]
    fitting = (way for way, found in held if peak_rank_bytes(found) <= limit)
    return next(fitting, held[-1][0] if held else ways[0])


def peak_rank_bytes(found: Estimate) -> int:
    """Bytes of the GPU of a rank, the actor's or a critic's own, that holds most."""
    return max(found.peak_bytes(Memory.DEVICE), found.peak_bytes(Memory.CRITIC))
