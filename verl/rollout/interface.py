"""Selects the `RolloutEngine` class of a run.

`actor_rollout_ref.rollout.name` is a key of `ENGINES`, or `path/file.py:Name` for a subclass of
`verl.engine.RolloutEngine`. Optional features may choose another class in its place
(`verl.seams.ENGINES`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl import plugins, seams
from verl.config import Config
from verl.engine import EngineDied as EngineDied
from verl.engine import Listener as Listener
from verl.engine import RolloutEngine as RolloutEngine

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
