"""What waits on the host between uses, where the options leave it open: chosen by the estimate.

So is what the room that is left on the devices is spent on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.preflight.memory.estimate import CLOSE, Estimate, Setting, estimate, free_memory
from verl.preflight.memory.needs import Memory, has_critic
from verl.training.kernels import kernel_problems

ACTOR = "actor_rollout_ref.actor.fsdp_config"
REFERENCE = "actor_rollout_ref.ref.fsdp_config"
CRITIC = "critic.model.fsdp_config"
OPTIONS = {
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
KEYS = (*OPTIONS, f"{REFERENCE}.optimizer_offload")
"""Every option of this kind; a reference has no optimizer."""

ROOM: dict[str, dict[bool | str, str]] = {
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


def changed(config: Config, change: Mapping[str, Any]) -> Config:
    """A copy of the options with some of them set, by their dotted names."""
    result = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(result), name, value)
    return result


def undecided(config: Config, keys: Iterable[str] = KEYS) -> list[str]:
    """Those of the options that are null, in order."""
    return [key for key in keys if attrgetter(key)(config) is None]


def open_choices(config: Config) -> list[str]:
    """Those of them that have an effect: the parts exist, and have weights of their own."""
    parts = [ACTOR]
    if config.needs_reference and not config.actor_rollout_ref.model.has_adapter:
        parts.append(REFERENCE)
    if has_critic(config) and not config.shares_base:
        parts.append(CRITIC)
    return [key for key in undecided(config) if key in OPTIONS and key.startswith(tuple(parts))]


def settled(config: Config, chosen: Mapping[str, Any] | None = None) -> Config:
    """A copy with `chosen` and without nulls: what else is open is false.

    A critic that shares the policy's base goes where that goes.
    """
    result = changed(config, chosen or {})
    for key in undecided(result):
        twin = key.replace(CRITIC, ACTOR) if config.shares_base else key
        result = changed(result, {key: bool(attrgetter(twin)(result))})
    return changed(result, dict.fromkeys(undecided(result, ROOM), True))


def spend(config: Config, setting: Setting, keys: Sequence[str]) -> Config:
    """A copy of settled options; each of `keys` has the first value of `ROOM` for which there is
    room, if any."""
    limit = CLOSE * free_memory(setting.machine)[Memory.DEVICE]
    for key in keys:
        ways = [changed(config, {key: value}) for value in ROOM[key]]
        able = (way for way in ways if not any(kernel_problems(way)))
        fitting = (way for way in able if of_a_rank(estimate(way, setting)) <= limit)
        config = next(fitting, config)
    return config


def everything(config: Config) -> Config:
    """A copy in which all that is open waits on the host."""
    return settled(config, dict.fromkeys(open_choices(config), True))


def choose(config: Config, setting: Setting) -> Config:
    """The cheapest that the host can hold and that fits each GPU with room to spare.

    Where there is none, the most that the host can hold.
    """
    keys, free = open_choices(config)[::-1], free_memory(setting.machine)
    values = itertools.product((False, True), repeat=len(keys))  # the last, cheapest, varies most
    ways = [settled(config, dict(zip(keys, way, strict=True))) for way in values]
    needs = [(way, estimate(way, setting)) for way in ways]
    held = [(way, found) for way, found in needs if found.most(Memory.HOST) <= free[Memory.HOST]]
    limit = CLOSE * free[Memory.DEVICE]
    fitting = (way for way, found in held if of_a_rank(found) <= limit)
    return next(fitting, held[-1][0] if held else ways[0])


def of_a_rank(found: Estimate) -> int:
    """Bytes of the GPU of a rank, the actor's or a critic's own, that holds most."""
    return max(found.most(Memory.DEVICE), found.most(Memory.CRITIC))
