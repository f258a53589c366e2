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
from verl.errors import PreflightError, UserError
from verl.preflight import models
from verl.preflight.undecided import fill_undecided
from verl.rollout.interface import chosen, engine_problems

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


def planned(config: Config) -> tuple[Config, Iterable[UserError]]:
    """Return the options with every null decided, and why the run does not fit the machine."""
    plan: tuple[Config, Iterable[UserError]] | None
    plan = seams.first(seams.PLANNERS, "planned", config)
    return (fill_undecided(config), ()) if plan is None else plan


def optional_problems(config: Config) -> Iterator[UserError]:
    """Yield the problems that the parts of `verl.seams.CHECKS` find."""
    for module in seams.plugged(seams.CHECKS):
        yield from module.problems(config)
