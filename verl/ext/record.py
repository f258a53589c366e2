"""`trainer.rollout_data_dir`: records each step's trajectories, scores and token columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.jagged import sequence_ids
from verl.data.trajectories import (
    SIGNALS,
    HasVocabulary,
    Signals,
    prepare_folder,
    write_step,
)
from verl.model_files import weights_fingerprint
from verl.trainer.hooks import Hook
from verl.training.actor import rollout_correction

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class RecordHook(Hook):
    """Writes the step's samples with the token columns of those that it trains on."""

    @contextmanager
    def during(self, phase: str, trainer: RayPPOTrainer) -> Iterator[None]:
        """Record after `prepare`, also if it fails, and so always before the updates.

        A step whose rollouts cannot be written is run again from the weights that it started with.
        """
        try:
            yield
        finally:
            if phase == "prepare":
                with trainer.current.timings.phase("rollout_data"):
                    self.record(trainer)

    def record(self, trainer: RayPPOTrainer) -> None:
        """Write all samples of the current step."""
        directory, step = trainer.config.trainer.rollout_data_dir, trainer.current
        assert directory is not None and step.batch is not None
        keys = [t.key for t in step.samples.trajectories]
        signals = token_signals(step.batch, trainer.config)
        sampled = trainer.source.sampled
        by_key = dict(zip(keys, signals, strict=True))
        write_step(directory, trainer.step, sampled.trajectories, sampled.rewards, by_key)


def prepare(config: Config, tokenizer: HasVocabulary, step: int, total_steps: int) -> None:
    """Prepare the folder of a run that records and continues after `step`. Raises ConfigError."""
    directory = config.trainer.rollout_data_dir
    if directory is None or config.trainer.val_only:
        return
    if step > 0 and config.trainer.resume_mode == "auto":
        step = max(step, total_steps)  # the run replaces its own later steps one by one
    weights = weights_fingerprint(config.actor_rollout_ref.model.path)
    prepare_folder(directory, tokenizer, weights, step)


def hook(parts: Parts) -> RecordHook | None:
    """Return the hook of a run that samples and keeps its trajectories."""
    directory = parts.config.trainer.rollout_data_dir
    return RecordHook() if directory is not None and parts.config.samples_rollouts else None


def token_signals(batch: TokenBatch, config: Config) -> list[Signals]:
    """Return the columns to record for each sequence's tokens; NaN where tokens are not trained on.

    Only columns that the batch has so far are returned. With `old_log_probs=engine` the old
    log-probs are left out, since the record has the engine's. `rollout_weights` are added if an
    off-policy correction is configured.
    """
    tokens, mask = batch.tokens, batch.tokens["loss_mask"]
    columns = {name: tokens[name] for name in SIGNALS if name in tokens}
    if config.old_log_probs == "engine":
        columns.pop("old_log_probs", None)
    actor, old = config.actor_rollout_ref.actor, columns.get("old_log_probs")
    is_corrected = not actor.correction.is_none
    if old is not None and is_corrected:
        rollout = torch.where(tokens["policy_mask"], tokens["rollout_log_probs"], old)
        ids, weights = sequence_ids(batch.offsets), torch.zeros(batch.num_tokens)
        weights[mask] = rollout_correction(actor, old[mask], rollout[mask], ids[mask])
        columns["rollout_weights"] = weights
    masked = {name: column.where(mask, torch.nan).numpy() for name, column in columns.items()}
    bounds = pairwise(batch.offsets.tolist())
    return [{n: column[start:end] for n, column in masked.items()} for start, end in bounds]
