"""Checks a run's estimated memory against this machine's, before anything is loaded.

Where options are null, the estimate decides what is offloaded to the host between uses, how many
tokens a micro-batch has, and whether free device memory is used to save time. A run that cannot fit
is refused, one that hardly fits gets a warning, both with options that need less. On a cluster,
whose other nodes are not known here, nothing is refused.
"""

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from verl.config import Config
from verl.errors import ResourceError, UserError
from verl.ext.memory.budgets import Budget, enlarge, undecided_budgets, with_budgets
from verl.ext.memory.estimate import (
    REFUSE_ABOVE,
    REFUSE_HOST_ABOVE,
    WARN_ABOVE,
    Estimate,
    Setting,
    Shortage,
    estimate,
    free_memory,
)
from verl.ext.memory.needs import AWAKE, Memory
from verl.ext.model_shape import read_shape
from verl.machine import ENLARGE_SHARED_MEMORY, Machine, format_bytes
from verl.preflight.undecided import (
    MEMORY_FOR_SPEED,
    OFFLOAD_OPTIONS,
    fill_undecided,
    offload_everything,
    undecided,
    undecided_offloads,
    with_options,
)
from verl.training.allocator import is_expandable
from verl.training.devices import device_type, dtype_name, is_surely_cpu, resolve_dtype
from verl.training.network import joins_cluster
from verl.weights.files import selected_transport

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
"""Advice by the memory, or the phase, that has too little."""


def read_setting(config: Config) -> Setting | None:
    """Return this machine and the models; None if the estimate is off or not possible."""
    if config.trainer.memory_preflight == "off":
        return None
    policy = read_shape(config.actor_rollout_ref.model.path)
    critic = read_shape(config.critic_path)
    if policy is None or critic is None:
        logger.info("memory: not estimated: only for dense models in a folder or the hub's cache")
        return None
    on_gpu = device_type(config.trainer.device) == "cuda"
    machine = Machine.now(with_devices=on_gpu)
    dtype = resolve_dtype(config.trainer.compute_dtype, torch.device("cuda" if on_gpu else "cpu"))
    has_gaps = not is_expandable(os.environ, selected_transport(config).shares_memory)
    setting = Setting(policy, critic, on_gpu, machine, dtype_name(dtype), has_gaps)
    try:
        estimate(fill_undecided(config), setting)
    except (RuntimeError, TypeError, AttributeError) as error:
        # Model code that reads values of tensors fails on meta tensors, which have none.
        logger.info("memory: not estimated: the model cannot be tried on meta tensors (%s)", error)
        return None
    return setting


def decide_memory(config: Config, setting: Setting | None) -> Config:
    """Return the options with every null decided.

    First what is offloaded and how many tokens a micro-batch has, then how free memory is used to
    save time; without an estimate, none is.
    """
    keys = undecided(config, MEMORY_FOR_SPEED)
    chosen = decide_offload_and_budgets(config, setting)
    if keys and setting is not None and setting.machine.devices:
        chosen = spend_free_memory(chosen, setting, keys)
        values = [(MEMORY_FOR_SPEED[key], attrgetter(key)(chosen)) for key in keys]
        effects = [effect[value] for effect, value in values if value in effect]
        logger.info("use of free memory: %s", ", ".join(effects) or "none, there is too little")
    return chosen


def decide_offload_and_budgets(config: Config, setting: Setting | None) -> Config:
    """Return the options with every null of `*_offload` and token budget decided; log both.

    On CPU nothing is offloaded, and budgets stay null. If the memory of the GPUs cannot be
    estimated on this driver, all is offloaded: slow, but never the reason that a run does not fit.
    """
    keys, budgets = undecided_offloads(config), undecided_budgets(config)
    if not keys + budgets or is_surely_cpu(config.trainer.device):
        return fill_undecided(config)
    if setting is None or not setting.machine.devices:
        config = with_budgets(config, {budget.key: budget.wanted for budget in budgets})
        _log_budgets(config, budgets)
        if not keys:
            return fill_undecided(config)
        chosen = offload_everything(config)
        logger.warning("%s, whether or not the GPUs have room for it, since their memory was not "
                       "estimated; to keep it on them: OFFLOAD=false (train_*.sh), or %s=false",
                       _offload_line(chosen, keys), "=false ".join(keys))  # fmt: skip
        return chosen
    chosen = choose_memory(config, setting)
    _log_budgets(chosen, budgets)
    if not keys:
        return chosen
    tokens = {budget.key: attrgetter(budget.key)(chosen) for budget in budgets}
    without = peak_rank_bytes(estimate(fill_undecided(with_budgets(config, tokens)), setting))
    needed = peak_rank_bytes(estimate(chosen, setting))
    free = format_bytes(free_memory(setting.machine)[Memory.DEVICE])
    otherwise = "" if needed == without else f", and would need {format_bytes(without)} otherwise"
    logger.info("%s; each GPU needs %s of %s free%s",
                _offload_line(chosen, keys), format_bytes(needed), free, otherwise)  # fmt: skip
    return chosen


def _log_budgets(chosen: Config, budgets: Sequence[Budget]) -> None:
    """Log the token budgets that were null, and those that would not fit."""
    parts = []
    for budget in budgets:
        tokens = attrgetter(budget.key)(chosen)
        less = "" if tokens >= budget.wanted else f" ({budget.wanted:,} would need too much memory)"
        parts.append(f"{budget.key}={tokens}{less}")
    if parts:
        logger.info("tokens of a micro-batch on each GPU: %s", ", ".join(parts))


def _offload_line(chosen: Config, keys: Iterable[str]) -> str:
    parts = [OFFLOAD_OPTIONS[key] for key in keys if attrgetter(key)(chosen)]
    return f"offload to the host: {', '.join(parts) or 'nothing'}"


def memory_problems(config: Config, setting: Setting | None) -> Iterator[UserError]:
    """Yield a ResourceError if the run cannot fit; log the estimate, and warn if it hardly fits."""
    if setting is None:
        return
    estimated, machine = estimate(config, setting), setting.machine
    logger.info("memory needed and free:\n%s", table(estimated, machine))
    if setting.on_gpu and not machine.devices:
        return  # the check of devices reports this
    refuses = config.trainer.memory_preflight == "refuse" and not joins_cluster()
    if refuses and estimated.shortages(config, machine, REFUSE_ABOVE):
        yield ResourceError(verdict("too small", config, machine, estimated, REFUSE_ABOVE))
    elif estimated.shortages(config, machine, WARN_ABOVE):
        logger.warning("%s", verdict("barely large enough", config, machine, estimated, WARN_ABOVE))


def verdict(word: str, config: Config, machine: Machine, estimated: Estimate, limit: float) -> str:
    """Return the message about all needs above the share `limit`, with options that need less."""
    limits = f"{REFUSE_ABOVE:.0%} of what is free, on the host {REFUSE_HOST_ABOVE:.0%}"
    lines = [f"memory: this machine is {word} (refused above {limits}; "
             "trainer.memory_preflight=warn starts it):"]  # fmt: skip
    for short in estimated.shortages(config, machine, limit):
        lines.append(f"  {shortage_line(short, estimated)}; to need less: {hint(short, estimated)}")
    return "\n".join(lines)


def shortage_line(short: Shortage, estimated: Estimate) -> str:
    """Return which memory is too small, how much is needed, and what needs it."""
    phase = estimated.peak_phase(short.memory)
    needs = f"{short.memory} needs about {format_bytes(short.needed)}"
    if short.cause != phase.value:
        return f"{needs} for {short.cause}, but the engine's share is {format_bytes(short.free)}"
    largest = estimated.needs_in(short.memory, phase)[:5]
    parts = ", ".join(f"{need.name} {format_bytes(need.bytes)}" for need in largest)
    return f"{needs} in {short.cause} ({parts}), but {format_bytes(short.free)} is free"


def hint(short: Shortage, estimated: Estimate) -> str:
    """Return options that lower the need of that memory in that phase."""
    if short.cause != estimated.peak_phase(short.memory):
        return HINTS["cache"]
    if short.memory is Memory.HOST:
        return HINTS["host" if estimated.peak_bytes(Memory.DEVICE) else "cpu"]
    if short.memory is Memory.DEVICE:
        return HINTS["awake" if short.cause in AWAKE else "asleep"]
    return HINTS[short.memory]


def table(estimated: Estimate, machine: Machine) -> str:
    """Return a line per need in the peak phase of each memory, and a line with their total."""
    free, lines = free_memory(machine), []
    width = max(len(memory) for memory in Memory if estimated.peak_bytes(memory))
    for memory in Memory:
        phase = estimated.peak_phase(memory)
        needs = estimated.needs_in(memory, phase)
        if not needs:
            continue
        lines += [
            f"  {memory:{width}} {format_bytes(need.bytes):>9}  {need.name}" for need in needs
        ]
        available = f" of {format_bytes(free[memory])} free" if memory in free else ""
        total = format_bytes(estimated.total(memory, phase))
        lines.append(f"  {memory:{width}} {total:>9}  needed{available}, in {phase}")
    if estimated.engine is not None:
        tokens, cache = estimated.engine.cached_tokens, format_bytes(max(0, estimated.engine.cache))
        lines.append(f"  {estimated.engine.memory:{width}} {cache:>9}  of the engine's share is "
                     f"KV cache, for {tokens:,} tokens")  # fmt: skip
    return "\n".join(lines)


def spend_free_memory(config: Config, setting: Setting, keys: Sequence[str]) -> Config:
    """Return a copy in which each of `keys` has its fastest value that fits the GPUs, if any does.

    `config` has no undecided memory options.
    """
    limit = WARN_ABOVE * free_memory(setting.machine)[Memory.DEVICE]
    for key in keys:
        for value in MEMORY_FOR_SPEED[key]:
            candidate = with_options(config, {key: value})
            if peak_rank_bytes(estimate(candidate, setting)) <= limit:
                config = candidate
                break
    return config


def choose_memory(config: Config, setting: Setting) -> Config:
    """Return the options with offloading and token budgets decided, by what fits the GPUs.

    It is the cheapest offloading that fits the host's memory and, with a margin, each GPU's, with
    budgets that still keep a card busy; if there is none, with the smallest budgets. The budgets
    are then as large as they can be.
    """
    budgets, free = undecided_budgets(config), free_memory(setting.machine)
    limit = WARN_ABOVE * free[Memory.DEVICE]

    def fits(candidate: Config) -> bool:
        return peak_rank_bytes(estimate(candidate, setting)) <= limit

    busy = {budget.key: budget.busy for budget in budgets}
    least = {budget.key: budget.least for budget in budgets}
    fallback = config
    for tokens in (busy, least) if busy != least else (busy,):
        on_host = []
        candidates = list(_offloads(with_budgets(config, tokens)))
        for candidate in candidates:
            if estimate(candidate, setting).peak_bytes(Memory.HOST) > free[Memory.HOST]:
                continue
            if fits(candidate):
                return enlarge(candidate, budgets, tokens, fits)
            on_host.append(candidate)
        # None fits the GPUs: offload the most that the host can hold.
        fallback = on_host[-1] if on_host else candidates[0]
    return fallback


def _offloads(config: Config) -> Iterator[Config]:
    """Yield the options with each combination of the null offload options, the cheapest first."""
    keys = undecided_offloads(config)[::-1]
    for flags in itertools.product((False, True), repeat=len(keys)):  # the last varies most
        yield fill_undecided(config, dict(zip(keys, flags, strict=True)))


def peak_rank_bytes(needed: Estimate) -> int:
    """Return the peak bytes on a rank's GPU, the larger of the actor's and a separate critic's."""
    return max(needed.peak_bytes(Memory.DEVICE), needed.peak_bytes(Memory.CRITIC))
