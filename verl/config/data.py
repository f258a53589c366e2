"""Questions and their token budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from verl.config.option import option


@dataclass
class DataConfig:
    """Questions and token budgets."""

    train_files: Any = option(MISSING, resume="free")
    """Parquet or jsonl file of training rows, or a list of them."""
    val_files: Any = option(MISSING, resume="free")
    """Parquet or jsonl file of validation rows, or a list of them."""
    train_data_num: int | None = option(None, resume="fixed", ge=1)
    """Use only this many training rows, chosen by seed; null for all."""
    val_data_num: int | None = option(None, resume="logged", ge=1)
    """Use only this many validation rows, chosen by seed; null for all."""
    train_batch_size: int = option(512, resume="fixed", ge=1)
    """Prompts per training step, before sampling `n_agent` trajectories of each."""
    val_batch_size: int = option(256, resume="free", ge=1)
    """Prompts per validation request; every row is scored whatever this is."""
    max_prompt_length: int = option(4096, resume="logged", ge=1)
    """Tokens the engine may be given at any turn: prompt, earlier turns and observations."""
    max_response_length: int = option(500, resume="logged", ge=1)
    """Tokens the policy may sample in one turn."""
    max_start_length: int = option(2048, resume="logged", ge=1)
    """Tokens of the initial prompt; longer rows are filtered before training, with the count."""
    max_obs_length: int = option(500, resume="logged", ge=1)
    """Tokens of one observation, wrapping included."""
    shuffle_train_dataloader: bool = option(True, resume="experiment")
    """Shuffle training rows every epoch, by `trainer.seed`."""
    rollouts: str | None = option(None, resume="free")
    """Learn from the trajectories that a run kept in this folder, its
    `trainer.rollout_data_dir`, step by step, without engines, questions or tools
    (docs/offline.md); null samples them."""
    rescore: bool = option(False, resume="experiment")
    """Score them by `reward_model`, and not as they were when they were recorded."""
    prompt_key: str = option("prompt", resume="experiment")
    """Column that holds the chat messages (or a plain string for base models)."""
    filter_overlong_prompts: bool = option(True, resume="experiment")
    """Drop over-long rows with a count; false refuses them with their numbers."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest trajectory: the last context and one more response."""
        return self.max_prompt_length + self.max_response_length
