"""Does it fit? An estimate against a machine, and settings that would fit, found by trying them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config import Config
from verl.machine import Machine
from verl.preflight.memory.estimate import Estimate, Setting, estimate
from verl.preflight.memory.needs import Place
from verl.preflight.memory.ranks import has_critic
from verl.training.worker import actor_budgets


@dataclass(frozen=True)
class Limit:
    """How much of what is free an estimate may be."""

    share: float
    with_guesses: bool
    """Whether the constants for processes count."""


REFUSED = Limit(1.15, with_guesses=False)
"""What is above it is refused: no formula is that wrong."""
CLOSE = Limit(0.9, with_guesses=True)
"""What is above it is close; proposals stay below it."""
MAX_PROPOSALS = 4
MAX_NODES = 8
SINGLE_STEPS, LORA_RANK = 4, 32

Change = Mapping[str, Any]
"""Options and their values."""


@dataclass(frozen=True)
class Shortage:
    """A place that has less than is needed there."""

    place: Place
    what: str
    """What needs it: a phase, or the KV cache."""
    needed: int
    free: int


def shortages(config: Config, found: Estimate, machine: Machine, limit: Limit) -> list[Shortage]:
    """Places where the estimate is above `limit`."""
    free = {Place.HOST: machine.host.free}
    if machine.shared_free is not None:
        free[Place.SHARED] = machine.shared_free
    if found.engine is not None and machine.devices:
        free[Place.DEVICE] = min(device.free for device in machine.devices)
    short = [
        Shortage(place, found.peak(place).value, found.most(place), size)
        for place, size in free.items()
        if found.most(place, limit.with_guesses) > limit.share * size
    ]
    engine, longest = found.engine, config.data.max_model_len
    if engine is not None and engine.cached_tokens < longest:
        needed = engine.share - engine.cache + longest * engine.per_token
        what = f"an engine with KV cache for one trajectory of {longest} tokens"
        short.append(Shortage(Place.DEVICE, what, needed, engine.share))
    return short


def changed(config: Config, change: Change) -> Config:
    """A copy of the options with some of them set."""
    result = copy.deepcopy(config)
    for key, value in change.items():
        *sections, name = key.split(".")
        target: Any = result
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return result


def proposals(
    config: Config, setting: Setting, machine: Machine
) -> Iterator[tuple[Change, Estimate]]:
    """Changes after which the run fits with room to spare: alone, by pairs, or all at once."""
    families = moves(config, setting, machine)
    for size in (1, 2):
        found = 0
        for chosen in itertools.combinations(families, size):
            for change in map(_joined, itertools.product(*chosen)):
                result = _fitting(config, setting, machine, change)
                if result is not None:
                    yield change, result
                    found += 1
                    break  # of one family the least that is enough
            if found == MAX_PROPOSALS:
                return
        if found:
            return
    everything: Change = {}
    for family in families:
        everything = {**everything, **family[-1]}
        result = _fitting(config, setting, machine, everything)
        if result is not None:
            yield everything, result
            return


def _joined(changes: Sequence[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}


def _fitting(config: Config, setting: Setting, machine: Machine, change: Change) -> Estimate | None:
    other = changed(config, change)
    found = estimate(other, setting)
    return None if shortages(other, found, machine, CLOSE) else found


def moves(config: Config, setting: Setting, machine: Machine) -> list[list[Change]]:
    """Ways to need less, the cheapest first; each is a list of ever stronger changes."""
    found = _of_any_device(config)
    found += _of_gpus(config) if setting.on_gpu else _of_cpu(config)
    found += [_adapters(config), *_more_devices(config, machine)]
    return [family for family in found if family]


def _of_any_device(config: Config) -> list[list[Change]]:
    """Less work at once."""
    section, longest = config.actor_rollout_ref, config.data.max_model_len
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    critic = "critic.ppo_max_token_len_per_gpu"
    budget, with_critic = actor_budgets(config).update, has_critic(config)
    smaller = [budget >> n for n in range(1, SINGLE_STEPS + 1) if budget >> n > longest]
    both = {critic: True} if with_critic else {}
    checkpointing = []
    if not section.model.enable_gradient_checkpointing:
        checkpointing.append("actor_rollout_ref.model.enable_gradient_checkpointing")
    if with_critic and not config.critic.model.enable_gradient_checkpointing:
        checkpointing.append("critic.model.enable_gradient_checkpointing")
    return [
        [dict.fromkeys(checkpointing, True)] if checkpointing else [],
        [{key: n, **dict.fromkeys(both, n)} for n in (*smaller, longest) if n < budget],
    ]


def _of_gpus(config: Config) -> list[list[Change]]:
    """A smaller engine, and what can wait on the host (or need not)."""
    section = config.actor_rollout_ref
    rollout, key = section.rollout, "actor_rollout_ref.rollout.gpu_memory_utilization"
    shares = [n / 20 for n in range(19, 3, -1) if n / 20 < rollout.gpu_memory_utilization]
    trained = {"actor_rollout_ref.actor": section.actor.fsdp_config}
    if has_critic(config):
        trained["critic.model"] = config.critic.model.fsdp_config
    kept = {f"{part}.fsdp_config": offload for part, offload in trained.items()}
    frozen = section.ref.fsdp_config
    free_host: Change = {
        f"{part}.{name}": False
        for part, offload in {**kept, "actor_rollout_ref.ref.fsdp_config": frozen}.items()
        for name in ("param_offload", "optimizer_offload")
        if getattr(offload, name)
    }
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    per_node = config.trainer.n_gpus_per_node
    sizes = [n for n in (2, 4, 8) if n > rollout.tensor_model_parallel_size and per_node % n == 0]
    reference = {"actor_rollout_ref.ref.fsdp_config.param_offload": True}
    return [
        [{key: share} for share in shares],
        [reference] if config.needs_reference and not frozen.param_offload else [],
        [{f"{part}.optimizer_offload": True for part in kept}],
        [{f"{part}.param_offload": True for part in kept}],
        [{size: n} for n in sizes],
        [free_host] if free_host else [],
    ]


def _of_cpu(config: Config) -> list[list[Change]]:
    """A smaller engine, and fewer processes."""
    rollout, ranks = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    key = "actor_rollout_ref.rollout.cpu_kv_cache_gib"
    return [
        [{key: 1}] if rollout.cpu_kv_cache_gib > 1 else [],
        [{"trainer.n_gpus_per_node": 1}] if ranks > 1 else [],
    ]


def _adapters(config: Config) -> list[Change]:
    """Training an adapter instead of all weights."""
    parts = ["actor_rollout_ref.model"] if not config.actor_rollout_ref.model.has_adapter else []
    if has_critic(config) and not config.critic.model.has_adapter:
        parts.append("critic.model")
    ranks = {f"{part}.lora_rank": LORA_RANK for part in parts}
    alphas = {f"{part}.lora_alpha": 2.0 * LORA_RANK for part in parts}
    return [{**ranks, **alphas}] if parts else []


def _more_devices(config: Config, machine: Machine) -> Iterator[list[Change]]:
    """The devices here that are idle, then more nodes like this one."""
    trainer = config.trainer
    key, here = "trainer.n_gpus_per_node", trainer.n_gpus_per_node
    yield [{key: here << n} for n in range(1, 4) if here << n <= len(machine.devices)]
    nodes = [trainer.nnodes << n for n in range(1, 4) if trainer.nnodes << n <= MAX_NODES]
    yield [{"trainer.nnodes": n} for n in nodes]
