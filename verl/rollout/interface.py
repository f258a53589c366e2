"""Selects the `RolloutEngine` class of a run and checks that a run can be trained with it.

`actor_rollout_ref.rollout.name` is a key of `ENGINES`, or `path/file.py:Name` for a subclass of
`verl.engine.RolloutEngine`. With `rollout.url` the engines are vLLM servers at these addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl import plugins
from verl.config import Config, engine_kwargs
from verl.engine import EngineDied as EngineDied
from verl.engine import Listener as Listener
from verl.engine import RolloutEngine as RolloutEngine
from verl.errors import ConfigError, explain
from verl.training.devices import device_type, is_surely_cpu
from verl.weights.files import selected_transport

ENGINES = {
    "vllm": "verl.rollout.vllm_engine:VllmEngine",
    "remote": "verl.ext.engines.remote:RemoteEngine",
    "transformers": "verl.ext.engines.transformers:TransformersEngine",
}
"""Import paths of the built-in engines; a module is imported only when its engine is selected."""
ADAPTER_ENGINES = {"vllm": "verl.ext.lora.vllm:AdapterEngine"}
"""Import paths of those that stand in for them where engines get the policy's adapter alone."""
SERVER = "verl.ext.servers.engine:VllmServer"
"""Import path of the engine that is used for the servers of `rollout.url`."""
NAME, URL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.url"
WEIGHTS_DIR = "actor_rollout_ref.rollout.weights_dir"
CPU_LACKS = {
    "quantization": "vLLM's CPU build has no kernel for 8-bit weights",
    "speculative_config": "vLLM's CPU build (0.32) verifies drafts at a wrong temperature",
}
"""Arguments of vLLM with which its CPU build fails, or samples from another distribution."""


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the class for a value of `actor_rollout_ref.rollout.name`. Raises ConfigError."""
    return _imported(plugins.resolve(NAME, name, ENGINES))


def selected_class(config: Config) -> type[RolloutEngine]:
    """Return the class of a run's engines. Raises ConfigError."""
    name = config.actor_rollout_ref.rollout.name
    if config.placement.is_external:
        return _imported(SERVER)
    if name in ADAPTER_ENGINES and engine_takes_adapter(config):
        return _imported(ADAPTER_ENGINES[name])
    return engine_class(name)


def _imported(target: Any) -> type[RolloutEngine]:
    """Import the class from `module:Name`; a class is returned as it is."""
    cls: type[RolloutEngine] = plugins.imported(target) if isinstance(target, str) else target
    return cls


def build_engine(config: Config, replica: int = 0) -> RolloutEngine:
    """Build the engine that `config` selects, without starting it."""
    return selected_class(config).from_config(config, replica)


def engine_takes_adapter(config: Config) -> bool:
    """Whether engines get the policy's adapter alone; otherwise they get merged weights."""
    section = config.actor_rollout_ref
    if not section.model.has_adapter or section.rollout.merge_adapter is not None:
        return section.model.has_adapter and not section.rollout.merge_adapter
    if device_type(config.trainer.device) == "cpu":  # where adapters slow the engine down
        return False
    name = section.rollout.name
    return not config.placement.is_external and (
        name in ADAPTER_ENGINES or engine_class(name).takes_adapters
    )


def engine_label(config: Config) -> str:
    """Return the option that selects the engines, for messages."""
    name = config.actor_rollout_ref.rollout.name
    return f"a server of {URL}" if config.placement.is_external else f"{NAME}={name}"


def engine_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the reasons why a run cannot be trained with its engine."""
    name = config.actor_rollout_ref.rollout.name
    try:
        cls = selected_class(config)
    except ConfigError as error:
        yield error
        return
    if not cls.takes_weights:
        expected = "an engine that can load new weights after each step"
        fix = (
            f"{NAME}=vllm, with {URL} for vLLM servers that you started (docs/guides/rollouts.md); "
            "to measure a fixed model, use search-r1 evaluate --endpoint"
        )
        yield ConfigError(explain(NAME, name, expected, fix))
    elif engine_takes_adapter(config) and not cls.takes_adapters:
        key = "actor_rollout_ref.rollout.merge_adapter"
        expected = f"true or null: {engine_label(config)} cannot load an adapter"
        yield ConfigError(explain(key, "false", expected, f"{key}=null"))
    try:
        yield from selected_transport(config).problems(config, cls)
    except ConfigError as error:
        yield error
    rollout = config.actor_rollout_ref.rollout
    if is_surely_cpu(config.trainer.device):
        for name in CPU_LACKS.keys() & engine_kwargs.given(rollout.engine_kwargs).keys():
            got, expected = rollout.engine_kwargs[name], f"nothing: {CPU_LACKS[name]}"
            yield ConfigError(explain(f"{engine_kwargs.KEY}.{name}", got, expected, "leave it out"))
