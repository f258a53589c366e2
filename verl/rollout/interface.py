"""Selects the `RolloutEngine` class of a run and checks that a run can be trained with it.

`actor_rollout_ref.rollout.name` is a key of `ENGINES`, or `path/file.py:Name` for a subclass of
`verl.engine.RolloutEngine`. With `rollout.url` the engines are vLLM servers at these addresses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from verl import plugins
from verl.config import Config
from verl.engine import INTERRUPTED as INTERRUPTED
from verl.engine import EngineDied as EngineDied
from verl.engine import Listener as Listener
from verl.engine import RolloutEngine as RolloutEngine
from verl.errors import ConfigError, explain
from verl.nvidia import dotted, is_older, version_of
from verl.training.devices import device_type, is_surely_cpu

ENGINES = {
    "vllm": "verl.rollout.vllm_engine:VllmEngine",
    "remote": "verl.rollout.remote_engine:RemoteEngine",
    "transformers": "verl.rollout.transformers_engine:TransformersEngine",
}
"""Import paths of the built-in engines; a module is imported only when its engine is selected."""
SERVER = "verl.rollout.vllm_server:VllmServer"
"""Import path of the engine that is used for the servers of `rollout.url`."""
NAME, URL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.url"
WEIGHTS_DIR = "actor_rollout_ref.rollout.weights_dir"
QUANTIZATION = "actor_rollout_ref.rollout.quantization"
SPECULATION = "actor_rollout_ref.rollout.speculative_config.method"
WEIGHT_SYNC = "actor_rollout_ref.rollout.weight_sync"

QUANTIZES_SINCE = (0, 26)
"""vLLM that quantizes while loading by the name that the engine uses, also when it reloads."""


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the class for a value of `actor_rollout_ref.rollout.name`. Raises ConfigError."""
    return _imported(plugins.resolve(NAME, name, ENGINES))


def selected_class(config: Config) -> type[RolloutEngine]:
    """Return the class of a run's engines. Raises ConfigError."""
    if config.is_external:
        return _imported(SERVER)
    return engine_class(config.actor_rollout_ref.rollout.name)


def _imported(target: Any) -> type[RolloutEngine]:
    """Import the class from `module:Name`; a class is returned as it is."""
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
    cls: type[RolloutEngine] = target
    return cls


def build_engine(config: Config, replica: int = 0) -> RolloutEngine:
    """Build the engine that `config` selects, without starting it."""
    return selected_class(config).from_config(config, replica)


def engine_takes_adapter(config: Config) -> bool:
    """Whether engines get the policy's adapter alone; otherwise they get merged weights."""
    section = config.actor_rollout_ref
    merge = section.rollout.merge_adapter
    if merge is None:
        is_cpu = device_type(config.trainer.device) == "cpu"  # where adapters slow the engine down
        merge = is_cpu or not selected_class(config).takes_adapters
    return section.model.has_adapter and not merge


def engine_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the reasons why a run cannot be trained with its engine."""
    name = config.actor_rollout_ref.rollout.name
    label = f"a server of {URL}" if config.is_external else f"{NAME}={name}"
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
        expected = f"true or null: {label} cannot load an adapter"
        yield ConfigError(explain(key, "false", expected, f"{key}=null"))
    if config.streams_weights and (not cls.can_receive or engine_takes_adapter(config)):
        expected = f"files: {label} cannot receive weights"
        if cls.can_receive:
            expected = "files: only the adapter is transferred, which is small"
        got = config.actor_rollout_ref.rollout.weight_sync
        yield ConfigError(explain(WEIGHT_SYNC, got, expected, f"{WEIGHT_SYNC}=files"))
    rollout = config.actor_rollout_ref.rollout
    if rollout.quantization is not None and is_surely_cpu(config.trainer.device):
        expected = "null: vLLM's CPU build has no kernel for 8-bit weights"
        yield ConfigError(explain(QUANTIZATION, rollout.quantization, expected, "leave it out"))
    yield from old_engine_problems(config, version_of("vllm"))
    method = rollout.speculative_config.method
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        expected = "ngram, or the installed package arctic_inference"
        fix = f"pip install arctic-inference, or {SPECULATION}=ngram"
        yield ConfigError(explain(SPECULATION, method, expected, fix))
    if rollout.interrupt_turns and not cls.can_interrupt:
        key = "actor_rollout_ref.rollout.interrupt_turns"
        expected = f"false: {label} cannot interrupt a turn"
        yield ConfigError(explain(key, "true", expected, f"{key}=false, or {NAME}=vllm"))


def old_engine_problems(config: Config, installed: str) -> Iterator[ConfigError]:
    """Yield what the installed vLLM is too old for: that of CUDA 12 wheels, 0.19."""
    quantization = config.actor_rollout_ref.rollout.quantization
    if quantization is None or config.is_external:
        return
    if is_older(installed, QUANTIZES_SINCE):
        got = f"{quantization} with vLLM {installed}"
        expected = f"vLLM {dotted(QUANTIZES_SINCE)} or newer, which needs driver 580"
        fix = "leave it out, or upgrade the driver and make install VENV=NEW_FOLDER"
        yield ConfigError(explain(QUANTIZATION, got, expected, fix))
