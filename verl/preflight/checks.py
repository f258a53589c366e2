"""Checks on the driver, before a run starts, that it has everything it needs.

The error lists every problem on its own line. Each part of the product checks what it needs, where
`verl.seams` names it. Rules between options are in `verl.config.rules`.
"""

import logging
from collections.abc import Iterable, Iterator

from verl import seams
from verl.agent.environment import Environment
from verl.agent.served import tool_problems
from verl.config import Config
from verl.errors import ConfigError, PreflightError, UserError, explain
from verl.preflight import models
from verl.preflight.undecided import fill_undecided
from verl.rollout.interface import NAME, URL, chosen
from verl.weights.files import selected_transport

logger = logging.getLogger(__name__)

PROBE_SECONDS = 10.0
"""Seconds that a tool may take to answer."""


def preflight(config: Config, environment: Environment) -> Config:
    """Check that the run can start, and return its options with those left to the machine decided.

    Raises PreflightError with all problems.
    """
    problems: list[UserError] = list(engine_problems(config)) if config.samples_rollouts else []
    if problems:  # the memory that a run needs depends on the engine
        raise PreflightError(problems)
    problems = list(models.model_problems(config)) or list(models.sharing_problems(config))
    if not problems:  # these read the models
        problems += models.record_problems(config)
        config, found = planned(config)
        problems += found
    if config.samples_rollouts:
        problems += chosen(config).engine.problems(config)
    problems += optional_problems(config)
    problems += tool_problems(environment, PROBE_SECONDS)
    if problems:
        raise PreflightError(problems)
    logger.info("preflight: model, data, tools, devices and disk are ready")
    return config


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


def planned(config: Config) -> tuple[Config, Iterable[UserError]]:
    """Return the options with every null decided, and why the run does not fit the machine."""
    plan: tuple[Config, Iterable[UserError]] | None
    plan = seams.first(seams.PLANNERS, "planned", config)
    return (fill_undecided(config), ()) if plan is None else plan


def optional_problems(config: Config) -> Iterator[UserError]:
    """Yield the problems that the parts of `verl.seams.CHECKS` find."""
    for module in seams.plugged(seams.CHECKS):
        yield from module.problems(config)
