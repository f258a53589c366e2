"""The composition root: the only module that connects the trainer with the agent and its tools.

Its command line is `verl.trainer.main_ppo`, which imports this module, and with it torch, Ray and
transformers, only after the options have been checked.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray

from search_r1.agent.generation import build_agent, build_environment, build_format, check_prompts
from search_r1.agent.with_token import WithToken
from search_r1.scoring import build_reward_manager
from verl import seams
from verl.agent.environment import Environment, no_tools
from verl.checkpoint import folders
from verl.config import Config, cli
from verl.core_algos.kl import AdaptiveKLController, FixedKLController, KLController
from verl.data.columns import Columns
from verl.data.outside import strings_of_rows
from verl.data.prompts import load_prompts
from verl.data.sampler import num_batches
from verl.files import exclusive_lock
from verl.model_files import load_tokenizer
from verl.monitor.tracking import Tracker, Tracking
from verl.plugins import PortableFactory
from verl.preflight.checks import preflight
from verl.preflight.models import fetch_models
from verl.remote_code import set_trust
from verl.rewards.interface import EachAlone, Reward, RewardManager
from verl.rollout.rollouts import TrainedRollouts
from verl.trainer.build import (
    Inputs,
    Parts,
    add_starters,
    replica_class,
    replicas_class,
    user_hooks,
)
from verl.trainer.cluster import start_ray
from verl.trainer.groups import StartUp, build_groups, build_ranks
from verl.trainer.loop import RayPPOTrainer
from verl.trainer.metric_names import check_metric_names
from verl.types import Prompt

OUTPUTS = ("trainer.default_local_dir", "trainer.rollout_data_dir")
"""Options with the folders that only one run at a time may write."""
Starter = Callable[[StartUp], None]
"""Adds to what happens when a run's actors start."""
Prompts = tuple[Sequence[Prompt], Sequence[Prompt]]
"""Training prompts and validation prompts."""


def build_kl_controller(config: Config) -> KLController:
    """Build the controller of the KL coefficient in the reward."""
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKLController(control.kl_coef, control.target_kl)
    return FixedKLController(control.kl_coef)


def count_steps(config: Config, num_rows: int) -> int:
    """Return the number of steps: `total_training_steps`, or the batches of `total_epochs`."""
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return num_batches(num_rows, config.data.train_batch_size, trainer.total_epochs)


def build_reward(config: Config) -> RewardManager:
    """Build the run's reward; a placeholder that is never called if all scores were recorded."""
    if not (config.samples_rollouts or config.data.rescore):
        return EachAlone(lambda trajectory: Reward(math.nan))
    return build_reward_manager(config)


def prepare(config: Config) -> Inputs:
    """Check everything that a run needs, decide machine-dependent options and read the questions.

    Reward, agent and the user's hooks are also built here, only to check that they can be: each
    attempt and each replica builds its own. A run on recorded trajectories calls no tools and reads
    no questions.
    """
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    calls_tools = config.do_search and config.samples_rollouts
    environment = replace(build_environment(config), enabled=calls_tools)
    reward = build_reward(config)
    list(user_hooks(config))
    config = preflight(config, environment)
    fetch_models(config)
    tokenizer = load_tokenizer(
        config.actor_rollout_ref.model.path, template_kwargs=config.data.chat_template_kwargs
    )
    asked = config, environment, tokenizer
    identity = seams.first(seams.IDENTITIES, "checked_identity", *asked) or {}
    cli.write_resolved(config, config.trainer.default_local_dir)
    step = resumed_step(config)
    prompts: Prompts = ([], [])
    if config.samples_rollouts:
        prompts = read_prompts(config, environment, tokenizer)
        check_metric_names(config, reward, {prompt.data_source for prompt in prompts[1]})
        build_agent(config)
        total_steps = count_steps(config, len(prompts[0]))
    else:
        from verl.ext.recorded import check_record  # noqa: PLC0415 - only where asked for

        total_steps = check_record(config, tokenizer, step)
    for module in seams.plugged(seams.PREPARERS):
        module.prepare(config, tokenizer, step, total_steps)
    return Inputs(config, *prompts, total_steps, environment, identity)


def resumed_step(config: Config) -> int:
    """Return the step of the checkpoint that a run resumes from; 0 for a fresh start."""
    trainer = config.trainer
    folder = folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))
    return 0 if folder is None else folders.step_of(folder)


def read_prompts(config: Config, environment: Environment, tokenizer: Any) -> Prompts:
    """Read the questions for training and validation. Raises DataError or ConfigError."""
    data, format = config.data, build_format(config, environment, tokenizer)
    wording = format.schemas, strings_of_rows(tokenizer, format.tags)
    columns = Columns.of_training(data)
    train = load_prompts(
        config, data.train_files, data.train_data_num, tokenizer, *wording, columns
    )
    val = load_prompts(config, data.val_files, data.val_data_num, tokenizer, *wording)
    check_prompts(format, itertools.chain(train, val), config.agent.name)
    return train, val


@contextlib.contextmanager
def running_trainer(
    inputs: Inputs, tracking: Tracking, *starters: Starter
) -> Iterator[RayPPOTrainer]:
    """Yield a trainer with all its processes, which end with the context, however it ends."""
    config = inputs.config
    updates = inputs.total_steps * config.updates_per_step
    agent = WithToken(PortableFactory(build_agent))
    environment = WithToken(PortableFactory(build_environment))
    start_up = StartUp(environment if config.samples_rollouts else no_tools)
    with start_up.end:
        for starter in (add_starters, *starters):
            starter(start_up)
        start_ray(config)
        try:
            rollouts: TrainedRollouts | None = None
            if config.samples_rollouts:
                classes = replica_class(config), replicas_class(config)
                ranks, replicas = build_groups(config, agent, updates, start_up, *classes)
                rollouts = start_up.wrap(replicas)
            else:
                ranks = build_ranks(config, updates, start_up)
            try:
                reward, controller = build_reward(config), build_kl_controller(config)
                yield Parts(
                    inputs, ranks, rollouts, reward, controller, tracking, start_up.hooks
                ).build()
            finally:
                if rollouts is not None:
                    rollouts.shutdown()
                ranks.shutdown()
        finally:
            ray.shutdown()


@contextlib.contextmanager
def built_trainer(config: Config) -> Iterator[RayPPOTrainer]:
    """Check and build everything for one attempt; all processes end with the context."""
    inputs = prepare(config)
    with (
        Tracking.from_config(inputs.config) as tracking,
        running_trainer(inputs, tracking) as trainer,
    ):
        yield trainer


def run(config: Config, trackers: Sequence[Tracker] = ()) -> None:
    """Execute one run from beginning to end, with its output folders locked.

    `trackers` receive the metrics in addition to those named by `trainer.logger`.
    """
    with contextlib.ExitStack() as locks:
        folders_to_lock: dict[Path, str] = {}
        for option in OUTPUTS:
            if (path := attrgetter(option)(config)) is not None:
                folders_to_lock.setdefault(Path(path).resolve(), option)
        for folder, option in folders_to_lock.items():
            locks.enter_context(exclusive_lock(folder, option))
        _run(prepare(config), trackers)


def _run(inputs: Inputs, trackers: Sequence[Tracker]) -> None:
    """Execute a run whose folders are locked."""
    with Tracking.from_config(inputs.config, trackers) as tracking:

        def attempt(config: Config, *starters: Starter) -> None:
            with running_trainer(replace(inputs, config=config), tracking, *starters) as trainer:
                trainer.fit()

        for module in seams.plugged(seams.SUPERVISORS):
            attempt = module.supervised(attempt)
        attempt(inputs.config)
