"""Training from recorded trajectories instead of sampling.

`RecordedCollector` is a `verl.trainer.collect.Source` that reads the steps of another run's
`trainer.rollout_data_dir` in the recorded order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agent.environment import Environment
from verl.config import Config
from verl.data.trajectories import (
    MODEL,
    TOKENIZER,
    HasVocabulary,
    RecordedTrajectory,
    fingerprint,
    read_fingerprints,
    read_step,
    recorded_steps,
)
from verl.errors import ConfigError, DataError, explain
from verl.model_files import weights_fingerprint
from verl.monitor.performance import Timings
from verl.rewards.interface import EachAlone, Reward, RewardManager
from verl.trainer.build import Prompts, Supply
from verl.trainer.collect import Measure, Samples, Source, select_for_training
from verl.trainer.groups import StartUp, start_building, start_ranks
from verl.trainer.learn import NO_LOG_PROBS_FIX
from verl.trainer.metrics import reward_metrics, rollout_metrics
from verl.trainer.ranks import TrainerRanks
from verl.types import Metrics, Origin

if TYPE_CHECKING:
    from verl.trainer.build import Parts

KEY = "data.rollouts"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "actor_rollout_ref.actor.old_log_probs=engine, or actor.rollout_is=token"
"""Options that correct for trajectories of other weights, for error messages."""


@dataclass
class RecordedCollector(Source):
    """Provides each step with the trajectories that were recorded for it."""

    config: Config
    reward: RewardManager
    measures: Sequence[Measure] = ()
    sampled: Samples = field(init=False, default_factory=Samples)

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """Return the step's selected samples, and metrics of all recorded. Raises DataError."""
        data = self.config.data
        assert data.rollouts is not None
        with timings.phase("gen"):
            rows = read_step(data.rollouts, step)
        samples = Samples([row.trajectory for row in rows], [row.reward for row in rows])
        if data.rescore:
            with timings.phase("reward"):
                samples.rewards = self.reward(samples.trajectories)
        self.sampled = samples
        num_prompts = len(samples.groups())
        selected, selection_metrics = select_for_training(samples, self.config, step, num_prompts)
        metrics = rollout_metrics(samples.trajectories) | reward_metrics(samples.rewards)
        for measure in self.measures:
            metrics |= measure(samples.trajectories)
        return selected, metrics | selection_metrics

    def state_dict(self) -> dict[str, Any]:
        """Return a position with the keys of `PromptSampler`, all 0: the order is in the record."""
        return {"sampler": {"epoch": 0, "position": 0, "num_rows": 0, "batch_size": 0}}


def check_record(config: Config, tokenizer: HasVocabulary, done: int) -> int:
    """Read and check every recorded step after `done`, the run's last finished step.

    Returns the last step of the run. Raises ConfigError or DataError.
    """
    folder = config.data.rollouts
    assert folder is not None
    recorded = read_fingerprints(folder)
    model = weights_fingerprint(config.actor_rollout_ref.model.path, recorded[MODEL])
    _check_model(config, recorded, fingerprint(tokenizer), model)
    steps = recorded_steps(folder)
    if not steps:
        got, expected = f"{folder}, without any step", "step_00000001.jsonl and later steps"
        raise DataError(explain(KEY, got, expected, "name a folder that a run wrote"))
    last = config.trainer.total_training_steps or steps[-1]
    if missing := sorted(set(range(done + 1, last + 1)) - set(steps)):
        got = f"{folder}, which has {len(steps)} steps, and not step {missing[0]}"
        expected = f"every step from {done + 1} to {last}"
        fix = "restore it"
        if missing[0] > done + 1:
            fix += f", or trainer.total_training_steps={missing[0] - 1}"
        raise DataError(explain(KEY, got, expected, fix))
    for step in range(done + 1, last + 1):
        _check_step(config, step, read_step(folder, step))
    return last


def _check_model(config: Config, recorded: Mapping[str, str], tokenizer: str, model: str) -> None:
    """Refuse a record of another tokenizer or, without off-policy correction, of other weights."""
    folder, key = config.data.rollouts, "actor_rollout_ref.model.path"
    path, actor = config.actor_rollout_ref.model.path, config.actor_rollout_ref.actor
    if recorded[TOKENIZER] != tokenizer:
        got = f"{folder}, with token ids of another tokenizer than {path}"
        raise ConfigError(explain(KEY, got, "its ids", f"{key}=the model of that run"))
    is_corrected = config.old_log_probs == "engine" or actor.correction.rollout_is != "none"
    if recorded[MODEL] != model and not is_corrected:
        got = f"{path}, other weights than those that {folder} started with"
        fix = f"{key}=the model of that run, or a correction: {CORRECTION}"
        raise ConfigError(explain(key, got, "the weights that sampled", fix))


def _check_step(config: Config, step: int, rows: Sequence[RecordedTrajectory]) -> None:
    """Refuse a step whose group sizes, weight versions or scores do not fit the options."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    where = f"step {step} of {data.rollouts}"
    sizes = list(Counter(row.trajectory.group for row in rows).values())
    other_size = next((size for size in sizes if size != rollout.n_agent), None)
    if other_size is not None:
        key, expected = f"{ROLLOUT}.n_agent", f"{other_size}, as a group of {where} has"
        raise ConfigError(explain(key, rollout.n_agent, expected, f"{key}={other_size}"))
    filters, batch_size = config.algorithm.filter_groups, data.train_batch_size
    min_groups = (1 - config.trainer.max_lost_share) * batch_size
    max_groups = batch_size * filters.max_num_gen_batches if filters.enable else batch_size
    if not min_groups <= len(sizes) <= max_groups:
        key, expected = "data.train_batch_size", f"{len(sizes)}, the prompts of {where}"
        raise ConfigError(explain(key, batch_size, expected, f"{key}={len(sizes)}"))
    sampled = [s for r in rows for s in r.trajectory.segments if s.origin is Origin.POLICY]
    staleness = step - min((s.weight_version for s in sampled), default=step)
    if staleness > rollout.max_staleness:
        got = f"tokens of {where} that are {staleness} versions old"
        expected = f"at most {ROLLOUT}.max_staleness={rollout.max_staleness}"
        raise ConfigError(explain(KEY, got, expected, f"{ROLLOUT}.max_staleness={staleness}"))
    log_probs = (x for s in sampled for x in s.log_probs)
    if config.reads_engine_log_probs and not all(map(math.isfinite, log_probs)):
        got = f"{where}, whose engine reported no log-probs"
        raise ConfigError(explain(KEY, got, "a log-prob for each token", NO_LOG_PROBS_FIX))


class Recorded(Supply):
    """Trajectories that another run recorded: no tools are called and no engines started."""

    calls_tools = False

    def __init__(self, config: Config, build_reward: Callable[[Config], RewardManager]) -> None:
        """`build_reward` is called if scores were not recorded, or are to be computed again."""
        super().__init__(config)
        self._build_reward = build_reward

    def reward(self) -> RewardManager:
        """Build the reward; a placeholder that is never called if all scores were recorded."""
        if self.config.data.rescore:
            return self._build_reward(self.config)
        return EachAlone(lambda trajectory: Reward(math.nan))

    def read(
        self, environment: Environment, tokenizer: Any, reward: RewardManager, step: int
    ) -> tuple[Prompts, int]:
        """Check the record; there are no questions."""
        return ([], []), check_record(self.config, tokenizer, step)

    def start(self, start_up: StartUp, updates: int) -> tuple[TrainerRanks, None]:
        """Start the ranks alone."""
        started = start_ranks(self.config, start_up)
        config, ranks = started.config, started.ranks
        for wait in [start_building(ranks, group, config, updates) for group in ranks.groups]:
            wait()
        return ranks, None


def supply(config: Config, build_reward: Callable[[Config], RewardManager]) -> Recorded | None:
    """Return the supply of a run with `data.rollouts`."""
    return None if config.samples_rollouts else Recorded(config, build_reward)


def source(parts: Parts, measures: Sequence[Measure]) -> RecordedCollector | None:
    """Return the source of a run that samples nothing."""
    if parts.rollouts is not None:
        return None
    return RecordedCollector(parts.config, parts.reward_manager, measures)
