"""Puts the trainer of a run together: its source, learner, transfer of weights and hooks.

With `verl.trainer.run`, the only module of the trainer that imports optional features, by option.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.agent.environment import Environment
from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import Saver
from verl.config import Config
from verl.core_algos.kl import KLController
from verl.data import PromptSampler
from verl.ext.counts import Counts
from verl.ext.reward_stages import RewardStages
from verl.ext.speed import Speed, WorkCounter
from verl.ext.steady import Steady
from verl.ext.stopping import Stopper, run_deadline
from verl.rewards.interface import RewardFn, RewardManager, adapted
from verl.rollout.pool import RetryingRollout
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.cluster import uses_gpus
from verl.trainer.collect import RolloutCollector, Source
from verl.trainer.export import Export
from verl.trainer.hooks import Hook
from verl.trainer.learn import Learner
from verl.trainer.loop import Logger, RayPPOTrainer, Transfer
from verl.trainer.progress import Progress
from verl.trainer.ranks import TrainerRanks
from verl.trainer.validate import Validation
from verl.types import Metrics, Prompt


def transfer_weights(ranks: TrainerRanks, rollouts: Any, step: int) -> dict[str, float]:
    """Wake the engines up, and have them load the weights that the ranks have after `step`."""
    start = time.perf_counter()
    rollouts.wake_up()
    awake = time.perf_counter()
    return {"wake_up": awake - start, **rollouts.update_weights(ranks)}


@dataclass
class Parts:
    """What a trainer is built from; processes are running, nothing is loaded or sampled yet."""

    config: Config
    ranks: TrainerRanks
    rollouts: Any
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    reward: RewardFn | RewardManager
    kl_controller: KLController
    logger: Logger
    total_steps: int
    environment: Environment = field(default_factory=Environment)
    faults: Callable[[], Metrics] = dict
    """Returns the counts of lost processes so far, for each step's metrics."""
    transfer: Transfer = transfer_weights
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Configuration and fingerprints to store in each checkpoint (`verl.ext.resume`)."""

    def build(self) -> RayPPOTrainer:
        """Build the trainer."""
        trainer, reward = self.config.trainer, adapted(self.reward)
        work = WorkCounter(self.config)
        directory = Path(trainer.default_local_dir)
        saver = Saver(trainer, directory, self.ranks, self.identity)
        stopper = Stopper(run_deadline(trainer.time_limit), saver.expected_s)
        rollout = RetryingRollout(
            self.rollouts, self.environment, stopper.check,
            expected_identity=self.identity.get("fingerprints", {}),
        )  # fmt: skip
        hooks: list[Hook] = [Speed(work, self.ranks.peak_flops()), Counts(self.faults)]
        if trainer.guard.enable:
            hooks.append(add_guard(self.config, saver))
        hooks += [
            Validation(self.config, rollout, self.val_prompts, reward, self.total_steps),
            RewardStages(reward),
        ]
        if trainer.rollout_data_dir is not None and self.config.samples_rollouts:
            from verl.ext.record import RecordHook  # noqa: PLC0415 - only where it is asked for

            hooks.append(RecordHook())
        if not trainer.val_only:
            hooks.append(Export(self.config, self.environment))
        hooks.append(Checkpoints(self.config, saver, self.total_steps, stopper))
        if trainer.trace:
            from verl.ext.trace import Trace  # noqa: PLC0415 - only where it is asked for

            hooks.append(Trace(directory))
        num_gpus = self.config.placement.num_gpus if uses_gpus(self.config) else 0
        hooks += [stopper, Progress(num_gpus), Steady()]
        return RayPPOTrainer(
            self.config,
            build_source(self.config, rollout, self.train_prompts, reward, self.total_steps),
            Learner(self.config, self.ranks, self.kl_controller, work),
            self.rollouts,
            self.transfer,
            self.logger,
            hooks,
            0 if trainer.val_only else self.total_steps,
        )


def add_guard(config: Config, saver: Saver) -> Hook:
    """Build the guard, which follows the saver's checkpoints."""
    from verl.ext.guard import CollapseGuard  # noqa: PLC0415 - only where it is asked for

    options = config.trainer.guard
    if not config.samples_rollouts:  # the policy moves away from recorded trajectories
        options = replace(options, mismatch_bound=None)
    guard = CollapseGuard(options, Path(config.trainer.default_local_dir), saver.finish_pending)
    saver.watchers.append(guard)
    return guard


def build_source(
    config: Config, rollout: RetryingRollout, prompts: Sequence[Prompt], reward: RewardManager,
    last_step: int,
) -> Source:  # fmt: skip
    """Build the source of a run's trajectories: recorded, sampled, or sampled ahead of time."""
    if not config.samples_rollouts:
        from verl.ext.recorded import RecordedCollector  # noqa: PLC0415 - only where asked for

        return RecordedCollector(config, reward)
    sampler = PromptSampler(
        len(prompts),
        config.data.train_batch_size,
        shuffle=config.data.shuffle_train_dataloader,
        seed=config.trainer.seed,
    )
    if config.actor_rollout_ref.rollout.max_staleness > 0 or has_batches_ahead(config):
        from verl.ext.asynchrony import AheadCollector  # noqa: PLC0415 - only where asked for

        return AheadCollector(config, rollout, prompts, sampler, reward, last_step)
    return RolloutCollector(config, rollout, prompts, sampler, reward)


def has_batches_ahead(config: Config) -> bool:
    """Whether the checkpoint to resume from was written by a run that samples ahead of time."""
    trainer = config.trainer
    folder = folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))
    return folder is not None and bool(RunState.read(folder).ahead)
