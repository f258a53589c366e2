"""Puts the trainer of a run together: its source, learner, transfer of weights and hooks.

With `verl.trainer.run`, the only module of the trainer that knows of optional features. It names
their modules as text: one that was deleted is left out, and the rest works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from verl import plugins
from verl.agent.environment import Environment
from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import Saver
from verl.config import Config
from verl.core_algos.kl import KLController
from verl.data.sampler import SAMPLERS, PromptSampler, Sampler
from verl.errors import ConfigError, explain
from verl.rewards.interface import RewardFn, RewardManager, adapted
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.rollout.rollouts import Rollouts, TrainedRollouts
from verl.trainer.collect import RolloutCollector, Source
from verl.trainer.groups import StartUp
from verl.trainer.hooks import Hook
from verl.trainer.learn import Learner
from verl.trainer.loop import Logger, RayPPOTrainer, Transfer
from verl.trainer.ranks import TrainerRanks
from verl.types import Prompt

HOOKS = (
    "verl.ext.speed", "verl.ext.turn_times", "verl.ext.staleness", "verl.ext.host_memory",
    "verl.ext.guard", "verl.trainer.validate", "verl.ext.reward_stages", "verl.ext.sibling",
    "verl.ext.record", "verl.trainer.export", "verl.ext.lora", "verl.ext.canary",
    "verl.trainer.checkpoints", "verl.ext.trace", "verl.ext.stopping", "verl.trainer.progress",
    "verl.ext.steady",
)  # fmt: skip
"""Modules with a function `hook(parts)`, in the order of their hooks; it returns None to have none.

What adds metrics comes before what keeps the step's state, and what ends a run after it.
"""
SUPERVISORS = ("verl.ext.restart",)
"""Modules with a function `supervised(attempt)`, which returns what is called in its place."""
STARTERS = ("verl.ext.overlapping", "verl.ext.reaper", "verl.ext.nodes", "verl.ext.cpu_env")
"""Modules with a function `add_to(start_up)`, in the order in which they are called."""
MEASURES = ("verl.ext.guard", "verl.ext.turn_times")
"""Modules with a function `measure(trajectories)`, for metrics of a step's trajectories."""
KEY = "trainer.hooks"


def transfer_weights(
    ranks: TrainerRanks, rollouts: TrainedRollouts, version: int
) -> dict[str, float]:
    """Wake the engines up, and have them load the weights that the ranks have now."""
    start = time.perf_counter()
    rollouts.wake_up()
    awake = time.perf_counter()
    return {"wake_up": awake - start, **rollouts.update_weights(ranks, version)}


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run, shared by all attempts."""

    config: Config
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    total_steps: int
    environment: Environment = field(default_factory=Environment)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Configuration and fingerprints to store in each checkpoint (`verl.ext.resume`)."""


@dataclass
class Parts:
    """What a trainer is built from; processes are running, nothing is loaded or sampled yet."""

    inputs: Inputs
    ranks: TrainerRanks
    rollouts: TrainedRollouts | None
    """None in a run on recorded trajectories."""
    reward: RewardFn | RewardManager
    kl_controller: KLController
    logger: Logger
    hooks: list[Hook] = field(default_factory=list)
    """Those that come first; `build` adds the others."""
    transfer: Transfer = transfer_weights

    def __post_init__(self) -> None:
        self.reward_manager = adapted(self.reward)

    @property
    def config(self) -> Config:
        """The run's options."""
        return self.inputs.config

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(self.config.trainer.default_local_dir)

    @cached_property
    def saver(self) -> Saver:
        """Writes the run's checkpoints."""
        return Saver(self.config.trainer, self.directory, self.ranks, self.inputs.identity)

    @cached_property
    def rollout(self) -> Rollouts | None:
        """The engines, for whatever samples; hooks may end the run while it waits for tools."""
        retry = plugins.optional("verl.ext.retry")
        if self.rollouts is None or retry is None:
            return self.rollouts
        expected = self.inputs.identity.get("fingerprints", {})
        rollout: Rollouts = retry.RetryingRollout(
            self.rollouts, self.inputs.environment, self._wait, expected
        )
        return rollout

    @cached_property
    def card_and_dtype(self) -> tuple[str, str]:
        """The ranks' GPU (empty on CPU) and compute dtype: the driver may lack such a device."""
        card, dtype = self.ranks.group.call("card_and_dtype")[0]
        return card, dtype

    @property
    def dtype(self) -> str:
        """The number format of engines and of the written policy, as `rollout_dtype` on a rank."""
        name = self.config.actor_rollout_ref.rollout.dtype
        return self.card_and_dtype[1] if name == "auto" else name

    def _wait(self) -> None:
        for hook in self.hooks:
            hook.on_wait()

    def build(self) -> RayPPOTrainer:
        """Build the trainer."""
        self.hooks.extend(built_hooks(self))
        return RayPPOTrainer(
            self.config,
            build_source(self),
            Learner(self.config, self.ranks, self.kl_controller),
            self.rollouts,
            self.transfer,
            self.logger,
            self.hooks,
            0 if self.config.trainer.val_only else self.inputs.total_steps,
        )


def user_hooks(config: Config) -> Iterator[Hook]:
    """Build the hooks of `trainer.hooks`. Raises ConfigError."""
    for name in config.trainer.hooks:
        hook = plugins.build(KEY, name, {}, config, "on_step_end")
        if not isinstance(hook, Hook):
            fix = "derive the class from verl.trainer.hooks.Hook"
            raise ConfigError(explain(KEY, f"a {type(hook).__name__} from {name}", "a Hook", fix))
        yield hook


def add_starters(start_up: StartUp) -> None:
    """Add what optional features do when a run's actors start."""
    for name in STARTERS:
        module = plugins.optional(name)
        if module is not None:
            module.add_to(start_up)


def built_hooks(parts: Parts) -> Iterator[Hook]:
    """Yield the run's hooks: the user's, then the others in the order of `HOOKS`."""
    yield from user_hooks(parts.config)
    for name in HOOKS:
        module = plugins.optional(name)
        hook: Hook | None = None if module is None else module.hook(parts)
        if hook is not None:
            yield hook


def build_source(parts: Parts) -> Source:
    """Build the source of a run's trajectories: recorded, sampled, or sampled ahead of time."""
    config, inputs = parts.config, parts.inputs
    measures = [module.measure for module in map(plugins.optional, MEASURES) if module is not None]
    if parts.rollout is None:
        from verl.ext.recorded import RecordedCollector  # noqa: PLC0415 - only where asked for

        return RecordedCollector(config, parts.reward_manager, measures)
    prompts = inputs.train_prompts
    sampler = build_sampler(config, prompts)
    sources = config, parts.rollout, prompts, sampler, parts.reward_manager, measures
    overlaps = config.actor_rollout_ref.rollout.max_staleness > 0
    if overlaps or has_batches_ahead(config):
        from verl.ext.asynchrony import AheadCollector  # noqa: PLC0415 - only where asked for

        source = AheadCollector(*sources, last_step=inputs.total_steps)
        if overlaps and parts.rollouts is not None:
            source.fetch_finished = parts.rollouts.fetch_finished
        return source
    return RolloutCollector(*sources)


def build_sampler(config: Config, prompts: Sequence[Prompt]) -> Sampler:
    """Build what orders the training rows: epochs, or what an option names."""
    data, seed = config.data, config.trainer.seed
    order = data.shuffle_train_dataloader if data.weight_column is None else "weighted"
    if isinstance(order, bool):
        return PromptSampler(len(prompts), data.train_batch_size, shuffle=order, seed=seed)
    key = "data.shuffle_train_dataloader"
    sampler: Sampler = plugins.load(key, order, SAMPLERS)(config, prompts)
    return sampler


def replica_class(config: Config) -> type[RolloutReplica]:
    """Return what hosts an engine: where weights change while it samples, it has a gate."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.replay is not None:
        from verl.ext.replay import ReplayingReplica  # noqa: PLC0415 - only where asked for

        return ReplayingReplica
    if rollout.max_staleness > 0:
        from verl.ext.gated import GatedReplica  # noqa: PLC0415 - only where asked for

        return GatedReplica
    timed = plugins.optional("verl.ext.turn_times")
    chosen: type[RolloutReplica] = RolloutReplica if timed is None else timed.TimedReplica
    return chosen


def replicas_class(config: Config) -> type[RolloutReplicas]:
    """Return the driver's side of the engines: where they never wait, it overlaps."""
    if config.actor_rollout_ref.rollout.max_staleness == 0:
        return RolloutReplicas
    from verl.ext.overlapping import OverlappingReplicas  # noqa: PLC0415 - only where asked for

    return OverlappingReplicas


def has_batches_ahead(config: Config) -> bool:
    """Whether the checkpoint to resume from was written by a run that samples ahead of time."""
    trainer = config.trainer
    folder = folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))
    return folder is not None and bool(RunState.read(folder).ahead)
