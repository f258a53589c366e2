"""Options that are null until the machine is known: what is offloaded, what memory is used for.

`fill_undecided` gives them the values that suit a CPU, or a GPU with memory to spare.
"""

import copy
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.training.roles import has_critic

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
"""Offload options and what they move to the host, by increasing time per step.

Each costs more than all before it together. The reference's weights are copied to the device when
used; optimizer state is copied there and back at each update; with offloaded weights, the CPU
accumulates gradients and computes the update.
"""
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
"""Options that use memory to save time, with their values and effects; both fastest first."""


def shares_base(config: Config) -> bool:
    """Return whether policy and critic train beside one frozen model, which is loaded once."""
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    is_same = critic.path in (None, policy.path) and not config.placement.is_apart("critic")
    return policy.is_frozen and critic.is_frozen and is_same


def with_options(config: Config, change: Mapping[str, Any]) -> Config:
    """Return a copy of the options with some of them set, by their dotted names."""
    result = copy.deepcopy(config)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(result), name, value)
    return result


def undecided(config: Config, keys: Iterable[str] = OFFLOAD_OPTIONS) -> list[str]:
    """Return the options that are null, in the order of `keys`."""
    return [key for key in keys if attrgetter(key)(config) is None]


def undecided_offloads(config: Config) -> list[str]:
    """Return the null offload options that have an effect: of models with weights of their own."""
    sections = [ACTOR]
    if config.needs_reference and not config.actor_rollout_ref.model.is_frozen:
        sections.append(REFERENCE)
    if has_critic(config) and not shares_base(config):
        sections.append(CRITIC)
    prefixes = tuple(sections)
    return [k for k in undecided(config) if k.startswith(prefixes)]


def fill_undecided(config: Config, chosen: Mapping[str, Any] | None = None) -> Config:
    """Return a copy with `chosen` set and the other undecided memory options at their defaults.

    Nothing else is offloaded, and nothing trades memory for time. A critic that shares the policy's
    base is offloaded with it.
    """
    result = with_options(config, chosen or {})
    for key in undecided(result):
        source = key.replace(CRITIC, ACTOR) if shares_base(config) else key
        result = with_options(result, {key: bool(attrgetter(source)(result))})
    return with_options(result, dict.fromkeys(undecided(result, MEMORY_FOR_SPEED), True))


def offload_everything(config: Config) -> Config:
    """Return a copy in which every undecided offload option is true."""
    return fill_undecided(config, dict.fromkeys(undecided_offloads(config), True))
