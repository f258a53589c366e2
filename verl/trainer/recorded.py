"""Learning from recorded trajectories: what gives a step its samples where nothing is sampled.

`RecordedCollector` has the interface of `verl.trainer.collection.RolloutCollector`, so that the
trainer takes either. It reads a run's `trainer.rollout_data_dir` step by step, in the order of the
record.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES
from verl.data import PromptSampler
from verl.data.trajectories import (
    MODEL,
    TOKENIZER,
    HasVocabulary,
    RecordedTrajectory,
    Signals,
    fingerprint,
    read_fingerprints,
    read_step,
    recorded_steps,
)
from verl.errors import ConfigError, DataError, explain
from verl.rewards.interface import RewardManager
from verl.rollout.pool import RetryingRollout
from verl.trainer.collection import RolloutCollector, Samples, chosen
from verl.trainer.learning import NO_LOG_PROBS_FIX
from verl.trainer.metrics import Timings, reward_metrics, rollout_metrics
from verl.types import Metrics, Origin, Prompt

KEY = "data.rollouts"
ROLLOUT = "actor_rollout_ref.rollout"


class RecordedOrder:
    """Stands for the order of the data, which is that of the record: it has no state."""

    def state_dict(self) -> dict[str, int]:
        """No position."""
        return {"epoch": 0, "position": 0, "num_rows": 0, "batch_size": 0}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Whatever the order of the run was that is gone on with, the record has it."""


@dataclass
class RecordedCollector:
    """Gives each step the trajectories that were recorded for it."""

    config: Config
    reward: RewardManager
    sampler: RecordedOrder = field(default_factory=RecordedOrder)

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """The step's trajectories with their scores, and metrics of all that were recorded.

        Dynamic sampling chooses among them again. Raises DataError.
        """
        data = self.config.data
        assert data.rollouts is not None
        with timings.phase("gen"):
            rows = read_step(data.rollouts, step)
        samples = Samples(
            [row.trajectory for row in rows],
            [row.reward for row in rows],
            [row.greedy_score for row in rows if row.greedy_score is not None],
        )
        if data.rescore:
            with timings.phase("reward"):
                samples.rewards = self.reward(samples.trajectories)
        rounds = math.ceil(len(samples.groups()) / data.train_batch_size)
        kept, counts = chosen(samples, self.config, step, rounds)
        found = rollout_metrics(samples.trajectories) | reward_metrics(samples.rewards)
        return kept, found | counts

    def record(self, step: int, samples: Samples, signals: Sequence[Signals]) -> None:
        """It is recorded."""

    def restart(self) -> None:
        """Nothing was begun for later steps."""

    def state_dict(self) -> list[dict[str, Any]]:
        """No prompts are drawn ahead."""
        return []

    def load_state_dict(
        self, state: Sequence[Mapping[str, Any]], finished: object = None, version: int = 0
    ) -> None:
        """What a run had drawn and finished ahead is in the record of its later steps."""

    def writer(self, batches: Sequence[Mapping[str, Any]], newest: int) -> None:
        """Nothing is finished ahead."""


def collector_of(
    config: Config,
    rollout: RetryingRollout,
    prompts: Sequence[Prompt],
    reward: RewardManager,
    with_greedy: bool,
    last_step: int,
) -> RolloutCollector | RecordedCollector:
    """What gives a run's steps their samples: its engines, or the record that it names."""
    if not config.samples_rollouts:
        return RecordedCollector(config, reward)
    sampler = PromptSampler(
        len(prompts),
        config.data.train_batch_size,
        shuffle=config.data.shuffle_train_dataloader,
        seed=config.trainer.seed,
    )
    return RolloutCollector(config, rollout, prompts, sampler, reward, with_greedy, last_step)


def check_record(config: Config, tokenizer: HasVocabulary, model: str, done: int) -> int:
    """The last step of a run that learns from a record, of which each step to come was read.

    `model`: the fingerprint of the weights that the run begins with; `done`: the step that it goes
    on from. Raises ConfigError or DataError, before anything is started.
    """
    folder = config.data.rollouts
    assert folder is not None
    _refuse_others(config, read_fingerprints(folder), fingerprint(tokenizer), model)
    steps = recorded_steps(folder)
    if not steps:
        raise DataError(explain(KEY, f"{folder}, without any step", "step_00000001.jsonl and "
                                "those after it", "name a folder that a run wrote"))  # fmt: skip
    last = config.trainer.total_training_steps or steps[-1]
    if missing := sorted(set(range(done + 1, last + 1)) - set(steps)):
        got = f"{folder}, which has {len(steps)} steps, and not step {missing[0]}"
        fewer = f", or trainer.total_training_steps={missing[0] - 1}" * (missing[0] > done + 1)
        expected = f"every step from {done + 1} to {last}"
        raise DataError(explain(KEY, got, expected, f"restore it{fewer}"))
    for step in range(done + 1, last + 1):
        _check_step(config, step, read_step(folder, step))
    return last


def _refuse_others(config: Config, made: Mapping[str, str], tokenizer: str, model: str) -> None:
    """Refuse ids of another tokenizer, and weights that did not sample, without a correction."""
    folder, key = config.data.rollouts, "actor_rollout_ref.model.path"
    if made[TOKENIZER] != tokenizer:
        got = f"{folder}, with ids of another tokenizer than {config.actor_rollout_ref.model.path}"
        raise ConfigError(explain(KEY, got, "its ids", f"{key}=the model of that run"))
    actor = config.actor_rollout_ref.actor
    is_corrected = config.old_log_probs == "engine" or actor.rollout_is != "none"
    if made[MODEL] != model and not is_corrected:
        got = f"{config.actor_rollout_ref.model.path}, other weights than {folder} was begun with"
        fix = f"{key}=the model of that run, or a correction: {CORRECTION}"
        raise ConfigError(explain(key, got, "the weights that sampled", fix))


CORRECTION = "actor_rollout_ref.actor.old_log_probs=engine, or actor.rollout_is=token"


def _check_step(config: Config, step: int, rows: Sequence[RecordedTrajectory]) -> None:
    """Refuse a step of other sizes, or of older weights, than the options say."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    where = f"step {step} of {data.rollouts}"
    sizes = list(Counter(row.trajectory.group for row in rows).values())
    other = next((size for size in sizes if size != rollout.n_agent), None)
    if other is not None:
        key = f"{ROLLOUT}.n_agent"
        expected = f"{other}, as a group of {where} has"
        raise ConfigError(explain(key, rollout.n_agent, expected, f"{key}={other}"))
    filters, size = config.algorithm.filter_groups, data.train_batch_size
    most = size * filters.max_num_gen_batches if filters.enable else size
    if not (1 - config.trainer.max_lost_share) * size <= len(sizes) <= most:
        key, expected = "data.train_batch_size", f"{len(sizes)}, the prompts of {where}"
        raise ConfigError(explain(key, size, expected, f"{key}={len(sizes)}"))
    spoken = [s for r in rows for s in r.trajectory.segments if s.origin is Origin.POLICY]
    age = step - min((v for s in spoken for v, _ in s.version_runs), default=step)
    if age > rollout.max_staleness:
        key, got = f"{ROLLOUT}.max_staleness", f"tokens of {where} that are {age} versions old"
        expected = f"at most {key}={rollout.max_staleness}"
        raise ConfigError(explain(KEY, got, expected, f"{key}={age}"))
    if config.reads_engine_log_probs and not all(
        math.isfinite(x) for s in spoken for x in s.log_probs
    ):
        got = f"{where}, whose engine told no log-probs"
        raise ConfigError(explain(KEY, got, "those of each token", NO_LOG_PROBS_FIX))
    estimator = config.algorithm.adv_estimator
    if ADVANTAGES[estimator].needs_greedy and any(row.greedy_score is None for row in rows):
        got = f"{where}, without scores of greedy trajectories"
        raise ConfigError(explain(KEY, got, f"those that {estimator} compares with",
                                  "algorithm.adv_estimator=grpo"))  # fmt: skip
