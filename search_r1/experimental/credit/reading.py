"""Reads the run whose documents are measured and checks the options, before torch is imported."""

import logging

from search_r1.experimental.credit.command import CreditOptions
from search_r1.experimental.weights import read_run_config
from search_r1.plain import configure_logging
from search_r1.runs.folder import find_rollouts, read_config
from verl.data.trajectories import HEADER, recorded_steps
from verl.errors import ConfigError, DataError, explain


def start(options: CreditOptions) -> int:
    """Write the worth of the documents in the selected steps; return the exit code."""
    configure_logging(logging.INFO, "%(message)s")
    raw_config = read_config(options.run)
    rollouts = options.rollouts or find_rollouts(options.run, raw_config)
    if rollouts is None or not (rollouts / HEADER).is_file():
        expected = f"a run that recorded its trajectories, or their folder with {HEADER}"
        fix = "name it, or --rollouts, or train with trainer.rollout_data_dir=FOLDER"
        raise ConfigError(explain("RUN", options.run, expected, fix))
    known = recorded_steps(rollouts)
    steps = options.steps or known[-1:]
    if not steps or not set(steps) <= set(known):
        got = ", ".join(map(str, sorted(set(steps) - set(known)))) or "none"
        expected = f"recorded steps of {rollouts}"
        expected += f": {known[0]} to {known[-1]}" if known else ", which has none"
        raise DataError(explain("--steps", got, expected, "name recorded steps"))
    config = read_run_config(options.run) if raw_config else None
    if config is None and not options.checkpoint:
        expected = f"weights, since {options.run} has no config.yaml"
        raise ConfigError(explain("--checkpoint", "none", expected, "--checkpoint FOLDER"))
    # torch and transformers take seconds to import
    from search_r1.experimental.credit.worth import write_worths  # noqa: PLC0415

    write_worths(options, rollouts, steps, raw_config, config)
    return 0
