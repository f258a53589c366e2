"""Options of the questions and their token budgets."""

from dataclasses import dataclass
from typing import Any

from verl.config.option import option

BY_SCORE = "by_score"
OTHER_ROWS_FIX = (
    "resume with the data, lengths, chat template and data.train_batch_size of the checkpoint; to "
    "begin with the first of other rows: trainer.resume_anyway=[data]"
)
MISSING = "???"
"""Marks an option without a default, as omegaconf does, whose import takes 0.1 s."""


@dataclass
class DataConfig:
    """Questions and token budgets."""

    train_files: Any = option(MISSING, resume="free")
    """Parquet or jsonl file with the training rows, or a list of such files; a data set of the hub
    is OWNER/NAME:SPLIT."""
    val_files: Any = option(MISSING, resume="free")
    """Parquet or jsonl file with the validation rows, or a list of such files; a data set of the
    hub is OWNER/NAME:SPLIT."""
    train_data_num: int | None = option(None, resume="fixed", ge=1)
    """Number of training rows to use, random, the same for every seed; null: all."""
    val_data_num: int | None = option(None, resume="logged", ge=1)
    """Number of validation rows to use, random, the same for every seed; null: all."""
    filter: dict[str, Any] = option(factory=dict, resume="fixed")
    """Train only on rows whose columns have these values, one of a list, or a number within bounds:
    {evidence: [topk, linked], pass_rate: {gt: 0, lt: 1}}. A column may also be a key of
    `extra_info`. {} uses all rows."""
    weight_column: str | None = option(None, resume="fixed")
    """Draw each batch at random by the weights in this column of the training rows, 0 or more; null
    shuffles all rows in every epoch."""
    train_batch_size: int = option(512, resume="fixed", ge=1)
    """Prompts per training step; `n_agent` trajectories are sampled for each."""
    val_batch_size: int = option(256, resume="free", ge=1)
    """Prompts per validation request. Does not affect the scores: every row is validated."""
    max_prompt_length: int = option(4096, resume="logged", ge=1)
    """Maximum tokens of the engine's input at any turn: prompt, earlier turns and observations."""
    max_response_length: int = option(500, resume="logged", ge=1)
    """Maximum tokens that the policy may sample in one turn."""
    max_start_length: int = option(2048, resume="logged", ge=1)
    """Maximum tokens of the initial prompt; longer rows are left out and counted in the log."""
    max_obs_length: int = option(500, resume="logged", ge=1)
    """Maximum tokens of one observation, including the text that wraps it."""
    shuffle_train_dataloader: bool | str = option(
        True, resume="experiment", choices=(True, False, BY_SCORE)
    )
    """Shuffle the training rows in every epoch, by `trainer.seed`. by_score (experimental) prefers
    rows whose last group taught something (docs/guides/data.md)."""
    rollouts: str | None = option(None, resume="free")
    """Train on recorded trajectories instead of sampling: the `trainer.rollout_data_dir` of an
    earlier run (docs/guides/rollouts.md)."""
    rescore: bool = option(False, resume="experiment")
    """Score recorded trajectories again with `reward_model`; false uses the recorded scores."""
    chat_template_kwargs: dict[str, Any] = option(resume="experiment", factory=dict)
    """Further arguments of the model's chat template, such as {enable_thinking: false}; they are
    stored with the exported model. The date that a template prints is always 26 July 2024."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a trajectory: the longest context plus one response."""
        return self.max_prompt_length + self.max_response_length
