"""Puts the trainer of a run together: its source, learner, transfer of weights and hooks.

Optional features take part through the seams of `verl.seams`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from verl import plugins, seams
from verl.agent.environment import Environment
from verl.checkpoint.saver import Saver
from verl.config import Config
from verl.core_algos.kl import KLController
from verl.data.sampler import SAMPLERS, PromptSampler, Sampler
from verl.errors import ConfigError, explain
from verl.rewards.interface import RewardFn, RewardManager, adapted
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.rollout.rollouts import Rollouts, TrainedRollouts
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.collect import Measure, RolloutCollector, Source
from verl.trainer.groups import StartUp
from verl.trainer.hooks import Hook
from verl.trainer.learn import Learner
from verl.trainer.loop import Logger, RayPPOTrainer, Transfer
from verl.trainer.ranks import TrainerRanks
from verl.training.devices import rollout_dtype
from verl.types import Prompt

KEY = "trainer.hooks"
Prompts = tuple[Sequence[Prompt], Sequence[Prompt]]
"""Training prompts and validation prompts."""


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
    record: Mapping[str, Any] = field(default_factory=dict)
    """What to store of the run in each checkpoint (`verl.seams.RECORDS`)."""


@dataclass
class Supply(ABC):
    """Where a run's trajectories come from, and what has to be read and started for it."""

    config: Config
    calls_tools: ClassVar[bool]
    """Whether tools must be there."""

    @abstractmethod
    def reward(self) -> RewardManager:
        """Build the run's reward."""

    @abstractmethod
    def read(
        self, environment: Environment, tokenizer: Any, reward: RewardManager, step: int
    ) -> tuple[Prompts, int]:
        """Read and check what a run reads that goes on after `step`.

        Returns the prompts and the number of steps. Raises ConfigError or DataError.
        """

    @abstractmethod
    def start(self, start_up: StartUp, updates: int) -> tuple[TrainerRanks, TrainedRollouts | None]:
        """Start the ranks, for that many updates of the actor, and engines if they are needed."""


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
        return Saver(self.directory, self.ranks, self.inputs.record)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Resumes the run, and saves it when that is due."""
        return Checkpoints(self.config, self.saver, self.inputs.total_steps)

    @cached_property
    def rollout(self) -> Rollouts | None:
        """The engines, for whatever samples; hooks may end the run while it waits for tools."""
        if self.rollouts is None:
            return None
        rollouts: Rollouts = self.rollouts
        for module in seams.plugged(seams.RETRIES):
            rollouts = module.retrying(rollouts, self)
        return rollouts

    def on_rank(self, function: Callable[[Config], Any]) -> Any:
        """Return what a function of the options returns on a rank: the driver may lack a GPU."""
        return self.ranks.group.run(function, self.config, on=[0])[0]

    @cached_property
    def dtype(self) -> str:
        """The number format of engines and of the written policy."""
        return str(self.on_rank(rollout_dtype))

    def on_wait(self) -> None:
        """Call the hooks while the run waits for tools."""
        for hook in self.hooks:
            hook.on_wait()

    def of_collector(self, measures: Sequence[Measure]) -> tuple[Any, ...]:
        """Return what a `RolloutCollector` is built from."""
        config, prompts = self.config, self.inputs.train_prompts
        sampler = build_sampler(config, prompts)
        return config, self.rollout, prompts, sampler, self.reward_manager, measures

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
    for module in seams.plugged(seams.STARTERS):
        module.add_to(start_up)


def built_hooks(parts: Parts) -> Iterator[Hook]:
    """Yield the run's hooks: the user's, then the others in the order of `verl.seams.HOOKS`."""
    yield from user_hooks(parts.config)
    for module in seams.plugged(seams.HOOKS):
        hook: Hook | None = module.hook(parts)
        if hook is not None:
            yield hook


def build_source(parts: Parts) -> Source:
    """Build the source of a run's trajectories; by default they are sampled step by step."""
    measures = [module.measure for module in seams.plugged(seams.MEASURES)]
    own: Source | None = seams.first(seams.SOURCES, "source", parts, measures)
    return RolloutCollector(*parts.of_collector(measures)) if own is None else own


def build_sampler(config: Config, prompts: Sequence[Prompt]) -> Sampler:
    """Build what orders the training rows: epochs, or what an option names."""
    data, seed = config.data, config.trainer.seed
    order = data.shuffle_train_dataloader if data.weight_column is None else "weighted"
    if isinstance(order, bool):
        size = data.train_batch_size
        if config.trainer.val_only:  # which draws no batch
            size = min(size, len(prompts))
        return PromptSampler(len(prompts), size, shuffle=order, seed=seed)
    key = "data.shuffle_train_dataloader"
    sampler: Sampler = plugins.load(key, order, SAMPLERS)(config, prompts)
    return sampler


def replica_class(config: Config) -> type[RolloutReplica]:
    """Return what hosts an engine."""
    own: type[RolloutReplica] | None = seams.first(seams.REPLICAS, "replica_class", config)
    return own or RolloutReplica


def replicas_class(config: Config) -> type[RolloutReplicas]:
    """Return the driver's side of the engines."""
    own: type[RolloutReplicas] | None = seams.first(seams.REPLICA_GROUPS, "replicas_class", config)
    return own or RolloutReplicas
