"""The run: where, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.config.guard import GuardConfig


@dataclass
class TrainerConfig:
    """The run: where, how long, how often."""

    project_name: str = "Search-R1"
    """What trackers file the run under."""
    experiment_name: str = "default"
    """The run's name in trackers and folders."""
    logger: Any = field(default_factory=lambda: ["console", "jsonl"])
    """Any of console, jsonl, wandb, tensorboard; a name or a list."""
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    """Where checkpoints, metrics and the resolved config go."""
    rollout_data_dir: str | None = None
    """Folder for every scored training trajectory, a jsonl file a step, as
    `verl.sft.rejection_sampling` reads them; null keeps none."""
    default_hdfs_dir: str | None = None
    """No effect any more: copy `default_local_dir` instead."""
    device: str = "auto"
    """auto (cuda where there is one), cuda, cpu."""
    compute_dtype: str = "auto"
    """Forward and backward: auto (bfloat16 where the device has units for it, else float16 on GPUs
    and float32 on CPU), bfloat16, float16 (with a scaled loss), float32. Master weights are float32
    always."""
    n_gpus_per_node: int = 8
    """Training ranks per node (on CPU: processes)."""
    nnodes: int = 1
    """Nodes of the Ray cluster that hold ranks."""
    node_timeout: float = 600.0
    """Seconds that a run waits for its nodes, at the start and after one was lost."""
    total_epochs: int = 15
    """Passes over the training rows, if `total_training_steps` is null."""
    total_training_steps: int | None = None
    """Updates of the run."""
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves at the end only, 0 never. A run that is interrupted saves
    in any case (docs/checkpoints.md)."""
    save_minutes: float | None = None
    """Minutes after which the next finished step is saved besides; null looks at steps only."""
    async_save: bool = True
    """Train on while a checkpoint is written, from a copy of each rank's shards in host memory;
    where the host has no room for that, and with false, training waits."""
    keep_last: int | None = None
    """Checkpoints to keep, newest first; null keeps all. Older ones that the guard needs, or that
    `keep_best` names, stay."""
    keep_best: int = 1
    """Checkpoints to keep besides, of the highest `best_metric` among those validated."""
    best_metric: str = "val/score"
    """Validation metric, the higher the better."""
    time_limit: float | None = None
    """Minutes that this process may take; a run saves and stops when another step might not fit.
    null asks SLURM_JOB_END_TIME, where Slurm sets it."""
    test_freq: int = -1
    """Steps between validations; -1 validates at start and end only, 0 never after start."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, then stop."""
    resume_mode: str = "disable"
    """disable, auto (latest complete checkpoint, if any), or the path of one."""
    resume_anyway: list[str] = field(default_factory=list)
    """What may differ from the checkpoint that is resumed from: data, corpus, algorithm … as the
    refusal names it."""
    seed: int = 0
    """Seed of data order, sampling and initialisation of the value head."""
    max_restarts: int = 3
    """How often a run may lose a process and go on by itself: a rollout replica, which is started
    again alone, or a training rank, with which everything starts again from the last checkpoint
    (docs/failures.md). Both count; 0 ends the run at the first."""
    hang_timeout: float | None = 600.0
    """Seconds without a sign of life after which a rollout replica counts as dead; null for
    none."""
    deterministic: bool = False
    """The same seed on the same machine gives the same metrics, bit for bit on CPU: each engine
    decodes one dialogue at a time, which is slow (docs/determinism.md); to compare runs by."""
    memory_preflight: str = "refuse"
    """What an estimate that this machine has not the memory for leads to: refuse, warn, off."""
    memory_watch_seconds: float = 5.0
    """Seconds between two looks at the host's memory during a run; 0 never looks."""
    memory_low: float = 0.1
    """Free share of the host's memory below which a line says what uses it; Ray kills at 0.05."""
    guard: GuardConfig = field(default_factory=GuardConfig)
