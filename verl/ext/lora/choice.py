"""Engines and roles of models that train an adapter.

Engines get the adapter alone, or merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from verl import plugins
from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, explain
from verl.rollout.interface import Choice, by_name, chosen, engine_class
from verl.training.devices import device_type

if TYPE_CHECKING:
    from verl.training.roles import Roles

STAND_INS = {"vllm": "verl.ext.lora.vllm:AdapterEngine"}
"""Import paths of the engines that take adapters in place of those of `rollout.name`."""
KEY = "actor_rollout_ref.rollout.merge_adapter"


def takes_adapters(engine: type[RolloutEngine]) -> bool:
    """Whether an engine loads adapters, as its class says by `takes_adapters = True`.

    Then the folder that its `update_weights` gets may be one of peft (`adapter_config.json`) for
    the weights that `start` loaded, in the place of the adapter before.
    """
    return bool(getattr(engine, "takes_adapters", False))


def engine_takes_adapter(config: Config) -> bool:
    """Whether engines get the policy's adapter alone; otherwise they get merged weights."""
    section = config.actor_rollout_ref
    if not section.model.has_adapter or section.rollout.merge_adapter is not None:
        return section.model.has_adapter and not section.rollout.merge_adapter
    if device_type(config.trainer.device) == "cpu":  # where adapters slow the engine down
        return False
    name = section.rollout.name
    if config.placement.servers:
        return False
    return name in STAND_INS or takes_adapters(engine_class(name))


def choice(config: Config) -> Choice | None:
    """Return the engines that get the adapter alone; None if they get merged weights."""
    if not engine_takes_adapter(config):
        return None
    name, named = config.actor_rollout_ref.rollout.name, by_name(config)
    engine = plugins.imported(STAND_INS[name]) if name in STAND_INS else named.engine
    return Choice(engine, named.label, is_whole=False)


def roles_class(config: Config) -> type[Roles] | None:
    """Return what builds the models, if one of them trains an adapter."""
    models = config.actor_rollout_ref.model, config.critic.model
    if not any(model.has_adapter for model in models):
        return None
    roles: type[Roles] = plugins.imported("verl.ext.lora.roles:AdaptedRoles")
    return roles


def for_actors(config: Config) -> Config:
    """Return the options with `merge_adapter` decided: another process may have another device."""
    section = config.actor_rollout_ref
    if not section.model.has_adapter:
        return config
    rollout = replace(section.rollout, merge_adapter=not engine_takes_adapter(config))
    return replace(config, actor_rollout_ref=replace(section, rollout=rollout))


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield that the engines cannot load an adapter which they are to get alone."""
    if not config.samples_rollouts or not engine_takes_adapter(config):
        return
    engines = chosen(config)
    if not takes_adapters(engines.engine):
        expected = f"true or null: {engines.label} cannot load an adapter"
        yield ConfigError(explain(KEY, "false", expected, f"{KEY}=null"))
