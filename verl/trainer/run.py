"""The composition root: the one place where the trainer meets the agent and its tools.

`run(config)` is a training run from beginning to end. Its command line is `verl.trainer.main_ppo`,
which imports this module, and torch, Ray and transformers with it, once the options are sound.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from search_r1.agent.generation import (
    build_agent,
    build_environment,
    build_format,
    check_prompts,
)
from search_r1.agent.retriever import WithToken
from search_r1.scoring import build_reward_manager
from search_r1.view.report import write_report
from verl.agent.environment import Environment
from verl.checkpoint import folders
from verl.checkpoint.resume import check_contents, check_resume, identity
from verl.config import Config, cli
from verl.core_algos.kl import AdaptiveKLController, FixedKLController, KLController
from verl.data import load_prompts, num_batches
from verl.data.trajectories import prepare_folder
from verl.errors import RankLost, ReplicaLost, UserError
from verl.files import exclusive_lock
from verl.model_files import load_tokenizer, tokenizer_identity
from verl.monitor.memory_watch import rank_names, watch_host_memory
from verl.monitor.tracking import Tracker, Tracking
from verl.plugins import PortableFactory
from verl.preflight.checks import preflight
from verl.remote_code import set_trust
from verl.rewards.interface import EachAlone, Reward, RewardManager
from verl.single_controller.actors import Restarts
from verl.single_controller.reaper import OrphanReaper
from verl.trainer.cluster import start_ray
from verl.trainer.groups import build_groups, build_ranks
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.recorded import check_record
from verl.types import Prompt

logger = logging.getLogger(__name__)

Prompts = tuple[Sequence[Prompt], Sequence[Prompt]]
"""Those to train on, and those to validate with."""


def build_kl_controller(config: Config) -> KLController:
    """The controller of KL in the reward."""
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKLController(control.kl_coef, control.target_kl, control.horizon)
    return FixedKLController(control.kl_coef)


def count_steps(config: Config, num_rows: int) -> int:
    """Updates of the run: `total_training_steps`, or enough for `total_epochs` passes."""
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return num_batches(num_rows, config.data.train_batch_size, trainer.total_epochs)


@dataclass(frozen=True)
class Prepared:
    """The checked inputs of a run, the same for every attempt at it."""

    config: Config
    environment: Environment
    identity: Mapping[str, Any]
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    total_steps: int


def build_reward(config: Config) -> RewardManager:
    """The run's reward; none where every score was recorded."""
    if not (config.samples_rollouts or config.data.rescore):
        return EachAlone(lambda trajectory: Reward(math.nan))
    return build_reward_manager(config)


def prepare(config: Config) -> Prepared:
    """Check everything that a run needs, decide what is left to its machine, read its questions.

    Its reward and agent are made here, too, to see that they can be: each attempt and each replica
    makes its own. A run that learns from recorded trajectories asks no tool and reads no questions.
    """
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    environment = replace(
        build_environment(config), enabled=config.do_search and config.samples_rollouts
    )
    build_reward(config)
    config = preflight(config, environment)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    made_with = identity(config, {**environment.identity(), **tokenizer_identity(tokenizer)})
    check_contents(config)
    check_resume(config, made_with)
    cli.write_resolved(config, config.trainer.default_local_dir)
    model = made_with["fingerprints"]["model"]
    prompts: Prompts = ([], [])
    if config.samples_rollouts:
        prompts = read_prompts(config, environment, tokenizer)
        build_agent(config)
        total_steps = count_steps(config, len(prompts[0]))
    else:
        total_steps = check_record(config, tokenizer, model, step_before(config))
    if config.trainer.rollout_data_dir is not None and not config.trainer.val_only:
        after = step_before(config)
        if after > 0 and config.trainer.resume_mode == "auto":
            after = max(after, total_steps)  # its own steps up to there come again
        prepare_folder(config.trainer.rollout_data_dir, tokenizer, model, after)
    return Prepared(config, environment, made_with, *prompts, total_steps)


def step_before(config: Config) -> int:
    """The step that a run goes on from; 0 where it begins."""
    trainer = config.trainer
    folder = folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))
    return 0 if folder is None else folders.step_of(folder)


def read_prompts(config: Config, environment: Environment, tokenizer: Any) -> Prompts:
    """The questions to train on and to validate with. Raises DataError or ConfigError."""
    data, format = config.data, build_format(config, environment, tokenizer)
    train, val = (
        load_prompts(config, files, num_rows, tokenizer, format.schemas)
        for files, num_rows in (
            (data.train_files, data.train_data_num), (data.val_files, data.val_data_num)
        )
    )  # fmt: skip
    check_prompts(format, itertools.chain(train, val))
    return train, val


@contextlib.contextmanager
def processes(
    prepared: Prepared, tracking: Tracking, restarts: Restarts
) -> Iterator[RayPPOTrainer]:
    """A trainer with all its processes, which end with the context, whatever ends that."""
    config = prepared.config
    updates = prepared.total_steps * config.updates_per_step
    with OrphanReaper() as reaper, watch_host_memory(config) as host_memory:
        start_ray(config)
        try:
            ranks, replicas = (
                build_groups(
                    config,
                    WithToken(PortableFactory(build_agent)),
                    WithToken(PortableFactory(build_environment)),
                    updates,
                    reaper,
                    restarts,
                )
                if config.samples_rollouts
                else build_ranks(config, updates, reaper)
            )
            node_id = ray.get_runtime_context().get_node_id()
            host_memory.names = {
                process: name
                for group in ranks.groups
                for process, name in rank_names(group.locations(), node_id, group.name).items()
            }
            try:
                yield RayPPOTrainer(
                    config=config,
                    ranks=ranks,
                    replicas=replicas,
                    train_prompts=prepared.train_prompts,
                    val_prompts=prepared.val_prompts,
                    reward_fn=build_reward(config),
                    kl_controller=build_kl_controller(config),
                    tracking=tracking,
                    total_steps=prepared.total_steps,
                    environment=prepared.environment,
                    faults=lambda: {**restarts.metrics(), **host_memory.metrics()},
                    identity=prepared.identity,
                )
            finally:
                replicas.shutdown()
                ranks.shutdown()
        finally:
            ray.shutdown()


@contextlib.contextmanager
def building(config: Config) -> Iterator[RayPPOTrainer]:
    """Check everything and build everything, once; all is taken down when the context ends."""
    prepared = prepare(config)
    with (
        Tracking.from_config(prepared.config) as tracking,
        processes(prepared, tracking, Restarts(config.trainer.max_restarts)) as trainer,
    ):
        yield trainer


def run(config: Config, trackers: Sequence[Tracker] = ()) -> None:
    """One run from beginning to end, which nobody else writes to the folders of.

    It starts again by itself when it lost a rank, and leaves a report, also where it was stopped.
    `trackers` are told of it beside those that `trainer.logger` names.
    """
    trainer = config.trainer
    written_to = {Path(trainer.default_local_dir).resolve(): "trainer.default_local_dir"}
    if trainer.rollout_data_dir is not None:
        written_to.setdefault(Path(trainer.rollout_data_dir).resolve(), "trainer.rollout_data_dir")
    with contextlib.ExitStack() as held:
        for folder, option in written_to.items():
            held.enter_context(exclusive_lock(folder, option))
        prepared = prepare(config)
        try:
            _run(prepared, trackers)
        except UserError:
            write_report(Path(trainer.default_local_dir))
            raise
        write_report(Path(trainer.default_local_dir))


def _run(prepared: Prepared, trackers: Sequence[Tracker]) -> None:
    """The attempts of a run whose folder is held."""
    restarts = Restarts(prepared.config.trainer.max_restarts)
    with Tracking.from_config(prepared.config, trackers) as tracking:

        def attempt(config: Config) -> None:
            with processes(replace(prepared, config=config), tracking, restarts) as trainer:
                trainer.fit()

        supervise(attempt, prepared.config, restarts)


def supervise(attempt: Callable[[Config], None], config: Config, restarts: Restarts) -> None:
    """Repeat `attempt` until it ends without having lost a rank, or a replica beyond repair.

    An attempt takes everything down, however it ends. The next one goes on from the newest
    checkpoint that this command wrote, whatever `trainer.resume_mode` says; where it wrote none
    yet, it starts as the command did. Raises the last loss when `restarts` are used up; whatever
    else ends a run ends it here too.
    """
    root = Path(config.trainer.default_local_dir)
    before = written(root)
    while True:
        try:
            return attempt(config)
        except (RankLost, ReplicaLost) as error:
            new = [folder for folder, when in written(root).items() if before.get(folder) != when]
            newest = max(new, key=folders.step_of, default=None)
            began = "the beginning" if config.trainer.resume_mode == "disable" else "where it began"
            restarts.spend_on_run(error, began if newest is None else str(newest))
            if newest is not None:
                config = replace(config, trainer=replace(config.trainer, resume_mode=str(newest)))


def written(root: Path) -> Mapping[Path, int]:
    """The complete checkpoints below `root`, each with the time its marker was written, in ns."""
    found = folders.all_complete(root)
    return {folder: (folder / folders.MARKER).stat().st_mtime_ns for folder in found}
