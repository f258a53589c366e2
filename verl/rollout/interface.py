"""`RolloutEngine`: what continues token ids, takes new weights, and gives its memory back.

`actor_rollout_ref.rollout.name` chooses one: a name of `ENGINES`, or `path/file.py:Name`, a class
derived from `RolloutEngine`. Only `generate` must be written; the rest has defaults for an engine
that needs no start, holds no device memory and keeps its weights.
"""

# ruff: noqa: B027 - an engine that has nothing to do in a call leaves it as it is here

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from verl import plugins
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.training.devices import device_type
from verl.types import Completion, Sampling

Listener = Callable[[str], None]
"""Hears new text of a completion."""


class EngineDied(Exception):
    """The engine behind this object is gone; every further call raises this too."""


class RolloutEngine(ABC):
    """One engine; it belongs to the event loop that starts it, and serves any number of requests.

    The trainer's order of calls is `start`, then again and again `wake_up`, `update_weights`, any
    number of `generate` at once, `sleep`; `shutdown` at the end. `probe` may come at any time.
    Any call may raise EngineDied.
    """

    takes_weights: ClassVar[bool] = False
    """Whether `update_weights` works; without it the engine cannot be trained with."""
    takes_adapters: ClassVar[bool] = False
    """Whether `update_weights` also takes a LoRA adapter by itself; else it is merged before."""

    @classmethod
    def from_config(cls, config: Config, replica: int) -> Self:
        """The engine of a run, not started; `replica` numbers it among the run's engines."""
        return cls(config, replica)  # type: ignore[call-arg]  # the constructor a plug-in writes

    async def start(self) -> None:
        """Load the model. Raises ModelError."""

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue `prompt_ids`; the stop string that ended the text is part of ids and text.

        `log_probs` are those of the distribution that was sampled from, after temperature and
        top-p; NaN where the engine does not tell them.
        """
        ...

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        """As `generate`; `listener` hears new text as it is sampled, here all of it at the end."""
        completion = await self.generate(prompt_ids, sampling)
        listener(completion.text)
        return completion

    async def update_weights(self, folder: str, version: int, is_adapter: bool = False) -> None:
        """Compute with the weights of a Hugging Face folder, and forget what the old ones cached.

        With `is_adapter`, with the adapter of peft's folder over the weights of `start`, in place
        of the adapter before. Completions carry `version` from now on; no request is running.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights")

    async def sleep(self) -> None:
        """Give device memory to the trainer; weights may be dropped."""

    async def wake_up(self) -> None:
        """Take device memory back; `update_weights` follows if weights were dropped."""

    async def probe(self) -> None:
        """Return when the engine shows that it lives, or raise EngineDied."""

    async def shutdown(self) -> None:
        """End the engine with its processes; harmless if it never started or has ended."""


ENGINES = {
    "vllm": "verl.rollout.vllm_engine:VllmEngine",
    "remote": "verl.rollout.remote_engine:RemoteEngine",
    "transformers": "verl.rollout.transformers_engine:TransformersEngine",
}
"""Built-in engines; a module is imported when its engine is chosen."""


NAME = "actor_rollout_ref.rollout.name"


def engine_class(name: str) -> type[RolloutEngine]:
    """The class that `actor_rollout_ref.rollout.name` names. Raises ConfigError."""
    found: Any = plugins.resolve(NAME, name, ENGINES)
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    chosen: type[RolloutEngine] = found
    return chosen


def build_engine(config: Config, replica: int = 0) -> RolloutEngine:
    """The engine that `config` chooses, not started yet."""
    return engine_class(config.actor_rollout_ref.rollout.name).from_config(config, replica)


def engine_takes_adapter(config: Config) -> bool:
    """Whether the engine computes with the policy's adapter; else it gets their sum."""
    section = config.actor_rollout_ref
    merges = section.rollout.merge_adapter
    if merges is None:
        is_slower = device_type(config.trainer.device) == "cpu"
        merges = is_slower or not engine_class(section.rollout.name).takes_adapters
    return section.model.has_adapter and not merges


def engine_problems(config: Config) -> Iterator[ConfigError]:
    """Why the chosen engine cannot be trained with."""
    rollout = config.actor_rollout_ref.rollout
    try:
        chosen = engine_class(rollout.name)
    except ConfigError as error:
        yield error
        return
    if not chosen.takes_weights:
        expected = "an engine that takes new weights after each step"
        fix = f"{NAME}=vllm; a fixed model is measured by search-r1 evaluate --endpoint"
        yield ConfigError(explain(NAME, rollout.name, expected, fix))
    elif engine_takes_adapter(config) and not chosen.takes_adapters:
        key = "actor_rollout_ref.rollout.merge_adapter"
        expected = f"true or null, since {NAME}={rollout.name} takes whole weights only"
        yield ConfigError(explain(key, "false", expected, f"{key}=null"))
