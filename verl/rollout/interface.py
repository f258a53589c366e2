"""Selects the `RolloutEngine` class of a run and checks that a run can be trained with it.

`actor_rollout_ref.rollout.name` is a key of `ENGINES`, or `path/file.py:Name` for a subclass of
`verl.engine.RolloutEngine`. Optional features may choose another class in its place
(`verl.seams.ENGINES`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl import plugins, seams
from verl.config import Config
from verl.engine import EngineDied as EngineDied
from verl.engine import Listener as Listener
from verl.engine import RolloutEngine as RolloutEngine
from verl.errors import ConfigError, explain
from verl.weights.files import selected_transport

ENGINES = {
    "vllm": "verl.rollout.vllm_engine:VllmEngine",
    "remote": "verl.ext.engines.remote:RemoteEngine",
    "transformers": "verl.ext.engines.transformers:TransformersEngine",
}
"""Import paths of the built-in engines; a module is imported only when its engine is selected."""
NAME, URL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.url"


@dataclass(frozen=True)
class Choice:
    """The engines of a run."""

    engine: type[RolloutEngine]
    label: str
    """The option that selects them, for messages."""
    is_whole: bool = True
    """Whether they load all weights of the policy, not only those that are trained."""


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the class for a value of `actor_rollout_ref.rollout.name`. Raises ConfigError."""
    cls: type[RolloutEngine] = plugins.load(NAME, name, ENGINES)
    return cls


def chosen(config: Config) -> Choice:
    """Return a run's engines. Raises ConfigError."""
    choice: Choice | None = seams.first(seams.ENGINES, "choice", config)
    return by_name(config) if choice is None else choice


def by_name(config: Config) -> Choice:
    """Return the engines that `rollout.name` names. Raises ConfigError."""
    name = config.actor_rollout_ref.rollout.name
    return Choice(engine_class(name), f"{NAME}={name}")


def build_engine(config: Config, replica: int = 0) -> RolloutEngine:
    """Build the engine that `config` selects, without starting it."""
    return chosen(config).engine.from_config(config, replica)


def engine_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the reasons why a run cannot be trained with its engine."""
    try:
        engine = chosen(config).engine
    except ConfigError as error:
        yield error
        return
    if not engine.takes_weights:
        got, expected = config.actor_rollout_ref.rollout.name, "an engine that can load new weights"
        fix = (
            f"{NAME}=vllm, with {URL} for vLLM servers that you started (docs/guides/rollouts.md); "
            "to measure a fixed model, use search-r1 evaluate --endpoint"
        )
        yield ConfigError(explain(NAME, got, f"{expected} after each step", fix))
    try:
        yield from selected_transport(config).problems(config, engine)
    except ConfigError as error:
        yield error
