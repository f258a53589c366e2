"""The composition root: the only module that connects the trainer with the agent and its tools.

Its command line is `verl.trainer.main_ppo`, which imports this module, and with it torch, Ray and
transformers, only after the options have been checked.
"""

from __future__ import annotations

import contextlib
import itertools
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
from verl.data.prompts import load_prompts, warn_of_common
from verl.data.sampler import num_batches, starts_over
from verl.files import exclusive_lock
from verl.model_files import load_tokenizer
from verl.monitor.tracking import Tracker, Tracking
from verl.plugins import PortableFactory
from verl.preflight.checks import preflight
from verl.preflight.models import fetch_models
from verl.remote_code import set_trust
from verl.rewards.interface import RewardManager
from verl.rollout.rollouts import TrainedRollouts
from verl.trainer.build import (
    Inputs,
    Parts,
    Prompts,
    Supply,
    add_starters,
    build_sampler,
    replica_class,
    replicas_class,
    user_hooks,
)
from verl.trainer.cluster import start_ray
from verl.trainer.groups import StartUp, build_groups
from verl.trainer.loop import Logger, RayPPOTrainer
from verl.trainer.metric_names import check_metric_names
from verl.trainer.ranks import TrainerRanks
from verl.training.checkpoint_files import checkpoint_errors
from verl.types import Prompt

OUTPUTS = ("trainer.default_local_dir", "trainer.rollout_data_dir")
"""Options with the folders that only one run at a time may write."""
Starter = Callable[[StartUp], None]
"""Adds to what happens when a run's actors start."""


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


def prepare(config: Config) -> Inputs:
    """Check everything that a run needs, decide machine-dependent options and read the questions.

    Reward, agent, data order and the user's hooks are also built here, only to check that they can
    be: each attempt and each replica builds its own.
    """
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    supply = chosen_supply(config)
    uses_tools = config.do_search and supply.calls_tools
    environment = replace(build_environment(config), enabled=uses_tools)
    reward = supply.reward()
    list(user_hooks(config))
    config = preflight(config, environment)
    fetch_models(config)
    tokenizer = load_tokenizer(
        config.actor_rollout_ref.model.path, template_kwargs=config.data.chat_template_kwargs
    )
    asked = config, environment, tokenizer
    record = seams.first(seams.RECORDS, "record", *asked) or {}
    cli.write_resolved(config, config.trainer.default_local_dir)
    step = resumed_step(config)
    prompts, total_steps = chosen_supply(config).read(environment, tokenizer, reward, step)
    for module in seams.plugged(seams.PREPARERS):
        module.prepare(config, tokenizer, step, total_steps)
    return Inputs(config, *prompts, total_steps, environment, record)


class Sampled(Supply):
    """Trajectories that engines sample, of dialogues with tools about the questions of files."""

    calls_tools = True

    def reward(self) -> RewardManager:
        """Build the run's reward."""
        return build_reward_manager(self.config)

    def read(
        self, environment: Environment, tokenizer: Any, reward: RewardManager, step: int
    ) -> tuple[Prompts, int]:
        """Read the questions; check that agent and data order can be built, and metrics' names."""
        prompts = read_prompts(self.config, environment, tokenizer)
        check_metric_names(self.config, reward, {prompt.data_source for prompt in prompts[1]})
        build_agent(self.config)
        check_order(self.config, prompts[0])
        return prompts, count_steps(self.config, len(prompts[0]))

    def start(self, start_up: StartUp, updates: int) -> tuple[TrainerRanks, TrainedRollouts]:
        """Start ranks and engines."""
        config, agent = self.config, WithToken(PortableFactory(build_agent))
        classes = replica_class(config), replicas_class(config)
        ranks, replicas = build_groups(config, agent, updates, start_up, *classes)
        return ranks, start_up.wrap(replicas)


def chosen_supply(config: Config) -> Supply:
    """Return where a run's trajectories come from."""
    return seams.first(seams.SUPPLIES, "supply", config, build_reward_manager) or Sampled(config)


def resumed_folder(config: Config) -> Path | None:
    """Return the checkpoint that a run resumes from; None for a fresh start."""
    trainer = config.trainer
    return folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))


def resumed_step(config: Config) -> int:
    """Return the step of the checkpoint that a run resumes from; 0 for a fresh start."""
    folder = resumed_folder(config)
    return 0 if folder is None else folders.step_of(folder)


def check_order(config: Config, prompts: Sequence[Prompt]) -> None:
    """Check that these training rows can be drawn, and that a resumed run can go on among them.

    Raises UserError, before anything is started.
    """
    sampler, folder = build_sampler(config, prompts), resumed_folder(config)
    if folder is not None:
        with checkpoint_errors(folder / folders.STATE_FILE):
            state = folders.RunState.read(folder).sampler
            if not starts_over(config, state, len(prompts)):
                sampler.load_state_dict(state)


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
    if not config.trainer.val_only:
        warn_of_common(train, val)
    return train, val


@contextlib.contextmanager
def running_trainer(inputs: Inputs, logger: Logger, *starters: Starter) -> Iterator[RayPPOTrainer]:
    """Yield a trainer with all its processes, which end with the context, however it ends."""
    config, supply = inputs.config, chosen_supply(inputs.config)
    environment = WithToken(PortableFactory(build_environment))
    start_up = StartUp(environment if supply.calls_tools else no_tools)
    with start_up.end:
        for starter in (add_starters, *starters):
            starter(start_up)
        start_ray(config)
        try:
            updates = inputs.total_steps * config.updates_per_step
            ranks, rollouts = supply.start(start_up, updates)
            try:
                reward, controller = supply.reward(), build_kl_controller(config)
                yield Parts(
                    inputs, ranks, rollouts, reward, controller, logger, start_up.hooks
                ).build()
            finally:
                if rollouts is not None:
                    rollouts.shutdown()
                ranks.shutdown()
        finally:
            ray.shutdown()


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
        inputs = prepare(config)
        with Tracking.from_config(inputs.config, trackers) as logger:
            _run(inputs, logger)


def _run(inputs: Inputs, logger: Logger) -> None:
    """Execute a run whose folders are locked, in one attempt or several."""

    def attempt(config: Config, *starters: Starter) -> None:
        with running_trainer(replace(inputs, config=config), logger, *starters) as trainer:
            trainer.fit()

    for module in seams.plugged(seams.SUPERVISORS):
        attempt = module.supervised(attempt)
    attempt(inputs.config)
