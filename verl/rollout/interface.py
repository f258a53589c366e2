"""Which `RolloutEngine` a run uses, and whether a run can be trained with it.

`actor_rollout_ref.rollout.name` chooses one: a name of `ENGINES`, or `path/file.py:Name`, a class
derived from `verl.engine.RolloutEngine`. With `rollout.url` it is vLLM's server behind an address.
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
from verl.training.devices import device_type, is_surely_cpu

ENGINES = {
    "vllm": "verl.rollout.vllm_engine:VllmEngine",
    "remote": "verl.rollout.remote_engine:RemoteEngine",
    "transformers": "verl.rollout.transformers_engine:TransformersEngine",
}
"""Built-in engines; a module is imported when its engine is chosen."""
SERVER = "verl.rollout.vllm_server:VllmServer"
"""The engine behind each address of `rollout.url`."""
NAME, URL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.url"
WEIGHTS_DIR = "actor_rollout_ref.rollout.weights_dir"
QUANTIZATION = "actor_rollout_ref.rollout.quantization"
GUESS = "actor_rollout_ref.rollout.speculative_config.method"
WEIGHT_SYNC = "actor_rollout_ref.rollout.weight_sync"


def engine_class(name: str) -> type[RolloutEngine]:
    """The class that `actor_rollout_ref.rollout.name` names. Raises ConfigError."""
    return _imported(plugins.resolve(NAME, name, ENGINES))


def chosen_class(config: Config) -> type[RolloutEngine]:
    """The class of a run's engines. Raises ConfigError."""
    if config.is_external:
        return _imported(SERVER)
    return engine_class(config.actor_rollout_ref.rollout.name)


def _imported(found: Any) -> type[RolloutEngine]:
    """A class, or the one at the place `module:Name`."""
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    chosen: type[RolloutEngine] = found
    return chosen


def build_engine(config: Config, replica: int = 0) -> RolloutEngine:
    """The engine that `config` chooses, not started yet."""
    return chosen_class(config).from_config(config, replica)


def engine_takes_adapter(config: Config) -> bool:
    """Whether the engine computes with the policy's adapter; else it gets their sum."""
    section = config.actor_rollout_ref
    merges = section.rollout.merge_adapter
    if merges is None:
        is_slower = device_type(config.trainer.device) == "cpu"
        merges = is_slower or not chosen_class(config).takes_adapters
    return section.model.has_adapter and not merges


def engine_problems(config: Config) -> Iterator[ConfigError]:
    """Why the chosen engine cannot be trained with."""
    name = config.actor_rollout_ref.rollout.name
    what = f"a server of {URL}" if config.is_external else f"{NAME}={name}"
    try:
        chosen = chosen_class(config)
    except ConfigError as error:
        yield error
        return
    if not chosen.takes_weights:
        expected = "an engine that takes new weights after each step"
        fix = (
            f"{NAME}=vllm, with {URL} for vLLM servers of your own (docs/placement.md); "
            "a fixed model is measured by search-r1 evaluate --endpoint"
        )
        yield ConfigError(explain(NAME, name, expected, fix))
    elif engine_takes_adapter(config) and not chosen.takes_adapters:
        key = "actor_rollout_ref.rollout.merge_adapter"
        expected = f"true or null, since {what} takes whole weights only"
        yield ConfigError(explain(key, "false", expected, f"{key}=null"))
    if config.streams_weights and (not chosen.can_receive or engine_takes_adapter(config)):
        expected = f"files: {what} receives no weights"
        if chosen.can_receive:
            expected = "files: an adapter alone is handed over, which is small"
        got = config.actor_rollout_ref.rollout.weight_sync
        yield ConfigError(explain(WEIGHT_SYNC, got, expected, f"{WEIGHT_SYNC}=files"))
    rollout = config.actor_rollout_ref.rollout
    if rollout.quantization is not None and is_surely_cpu(config.trainer.device):
        expected = "null: vLLM's CPU build has no kernel that rounds to 8 bits"
        yield ConfigError(explain(QUANTIZATION, rollout.quantization, expected, "leave it out"))
    method = rollout.speculative_config.method
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        expected = "ngram, or the package that keeps the suffix trees"
        fix = f"pip install arctic-inference, or {GUESS}=ngram"
        yield ConfigError(explain(GUESS, method, expected, fix))
    if rollout.interrupt_turns and not chosen.can_interrupt:
        key = "actor_rollout_ref.rollout.interrupt_turns"
        expected = f"false: {what} cannot end a turn before its time"
        yield ConfigError(explain(key, "true", expected, f"{key}=false, or {NAME}=vllm"))
