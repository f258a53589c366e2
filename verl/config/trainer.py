"""The run: where, how long, how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.bounds import MAX_SEED
from verl.config.option import option


@dataclass
class GuardConfig:
    """The collapse guard. A threshold that is null turns its rule off; see docs/guard.md."""

    enable: bool = option(True, resume="free")
    """Judge every training step."""
    action: str = option("warn", resume="free", choices=("warn", "stop", "rollback"))
    """On collapse: warn (log lines only, as for every warning), stop (exit status 3, naming the
    last healthy checkpoint) or rollback (go on from it with a lower learning rate)."""
    patience: int = option(3, resume="free", ge=1)
    """Steps in a row beyond a threshold that make a collapse; fewer are a warning."""
    baseline_steps: int = option(10, resume="free", ge=1)
    """Healthy steps, the latest, whose median is the baseline that thresholds are relative to."""
    drift_trajectories: int = option(16, resume="free", ge=0)
    """Correct trajectories whose log-probs are looked at again after the update; 0: none."""
    drift_drop: float | None = option(0.3, resume="free", ge=0)
    """Nats per token by which a step's updates may lower the log-prob of correct trajectories."""
    drift_crash: float | None = option(1.0, resume="free", ge=0)
    """The same, but a collapse at once: no later step can be trusted."""
    shift_bound: float | None = option(0.015, resume="free", ge=0)
    """Nats per token by which a step may move the policy: KL(before ‖ after) at correct
    trajectories. Two steps in a row are a collapse."""
    malformed_rise: float | None = option(0.3, resume="free", ge=0)
    """Rise over the baseline of the share of turns with broken tags or without an action."""
    no_answer_rise: float | None = option(0.3, resume="free", ge=0)
    """Rise over the baseline of the share of trajectories that end without an answer."""
    length_clip_rise: float | None = option(0.3, resume="free", ge=0)
    """Rise over the baseline of the share of turns that data.max_response_length cut off."""
    search_share: float | None = option(0.1, resume="free", ge=0)
    """Least share of the baseline that the share of trajectories with tool calls may shrink to."""
    entropy_share: float | None = option(0.1, resume="free", ge=0)
    """Least share of the baseline that the policy's entropy may shrink to."""
    entropy_rise: float | None = option(1.0, resume="free", ge=0)
    """Nats by which the policy's entropy may exceed the baseline."""
    grad_norm_growth: float | None = option(10.0, resume="free", ge=0)
    """Multiple of the baseline that the policy's gradient norm (before clipping) may reach."""
    skipped_updates: float | None = option(0.0, resume="free", ge=0)
    """Share of a step's updates that may be skipped for a loss or gradient that is not finite."""
    max_rollbacks: int = option(2, resume="free", ge=1)
    """Rollbacks of one run; the next collapse stops it."""
    rollback_lr_factor: float = option(0.3, resume="free", gt=0, le=1)
    """Each rollback multiplies the learning rates of actor and critic by this. The data goes on
    with prompts that were not seen yet."""


@dataclass
class TrainerConfig:
    """The run: where, how long, how often."""

    project_name: str = option("Search-R1", resume="free")
    """What trackers file the run under."""
    experiment_name: str = option("default", resume="free")
    """The run's name in trackers and folders."""
    logger: Any = option(
        factory=lambda: ["console", "jsonl"],
        resume="free",
        choices="verl.monitor.tracking:BACKENDS",
    )
    """Any of console, jsonl, wandb, tensorboard, mlflow, swanlab, trackio; a name or a list
    (docs/tracking.md)."""
    default_local_dir: str = option(
        "runs/${trainer.project_name}/${trainer.experiment_name}", resume="free"
    )
    """Where checkpoints, metrics and the resolved config go."""
    rollout_data_dir: str | None = option(None, resume="free")
    """Folder for every scored training trajectory, a jsonl file a step, as
    `verl.sft.rejection_sampling` reads them; null keeps none."""
    device: str = option("auto", resume="free", choices=("auto", "cuda", "cpu"))
    """auto (cuda where there is one), cuda, cpu."""
    compute_dtype: str = option(
        "auto", resume="logged", choices=("auto", "bfloat16", "float16", "float32")
    )
    """Forward and backward: auto (bfloat16 where the device has units for it, else float16 on GPUs
    and float32 on CPU), bfloat16, float16 (with a scaled loss), float32. Master weights are float32
    always."""
    share_prompts: bool = option(True, resume="logged")
    """Compute the prompt of a group once in passes and updates, where that spares a twentieth of a
    step's tokens or more: the same gradient but for rounding. false computes it for each
    trajectory."""
    keep_groups: bool = option(False, resume="logged")
    """Draw whole groups into mini-batches, which cut two at most: `share_prompts` then spares an
    update nearly as much as a pass. false draws single trajectories."""
    n_gpus_per_node: int = option(8, resume="free", ge=1)
    """Training ranks per node (on CPU: processes)."""
    trace: bool = option(False, resume="free")
    """Write what trainer, engines and trajectories did when to `trace.json`, for Perfetto, and have
    vLLM tell how long requests waited for a slot."""
    rollout_gpus: int = option(0, resume="free", ge=0)
    """GPUs of each node for engines alone, beside those of the ranks: engines then never sleep. 0:
    they share the ranks'. On CPU, cores."""
    nnodes: int = option(1, resume="free", ge=1)
    """Nodes of the Ray cluster that hold ranks."""
    node_timeout: float = option(600.0, resume="free", ge=0)
    """Seconds that a run waits for its nodes, at the start and after one was lost."""
    total_epochs: int = option(15, resume="free", ge=1)
    """Passes over the training rows, if `total_training_steps` is null."""
    total_training_steps: int | None = option(None, resume="free", ge=1)
    """Updates of the run."""
    critic_warmup: int = option(0, resume="logged", ge=0)
    """Steps in which only the critic learns."""
    save_freq: int = option(-1, resume="free", ge=-1)
    """Steps between checkpoints; -1 saves at the end only, 0 never. A run that is interrupted saves
    in any case (docs/checkpoints.md)."""
    save_minutes: float | None = option(None, resume="free", gt=0)
    """Minutes after which the next finished step is saved too; null looks at steps only."""
    async_save: bool = option(True, resume="free")
    """Train on while a checkpoint is written, from a copy of each rank's shards in host memory;
    where the host has no room for that, and with false, training waits."""
    keep_last: int | None = option(None, resume="free", ge=1)
    """Checkpoints to keep, newest first; null keeps all. Older ones that the guard needs, or that
    `keep_best` names, stay."""
    keep_best: int = option(1, resume="free", ge=0)
    """Further checkpoints to keep, of the highest `best_metric` among those validated."""
    best_metric: str = option("val/score", resume="free")
    """Validation metric, the higher the better."""
    time_limit: float | None = option(None, resume="free", gt=0)
    """Minutes that this process may take; a run saves and stops when another step might not fit.
    null asks SLURM_JOB_END_TIME, where Slurm sets it."""
    test_freq: int = option(-1, resume="free", ge=-1)
    """Steps between validations; -1 validates at start and end only, 0 never after start."""
    val_before_train: bool = option(True, resume="free")
    """Validate before the first step."""
    val_only: bool = option(False, resume="free")
    """Validate, then stop."""
    resume_mode: str = option("disable", resume="free")
    """disable, auto (latest complete checkpoint, if any), or the path of one."""
    resume_anyway: list[str] = option(factory=list, resume="free")
    """What may differ from the checkpoint that is resumed from: data, corpus, algorithm … as the
    refusal names it."""
    seed: int = option(0, resume="experiment", ge=0, le=MAX_SEED)
    """Seed of data order, sampling and initialisation of the value head."""
    max_restarts: int = option(3, resume="free", ge=0)
    """How often a run may lose a process and go on by itself: a rollout replica, which is started
    again alone, or a training rank, with which everything starts again from the last checkpoint
    (docs/failures.md). Both count; 0 ends the run at the first."""
    max_lost_share: float = option(0.02, resume="free", ge=0, le=1)
    """Share of a step's trajectories, or of a validation's rows, that may be lost to calls of tools
    that fail for good; beyond it the run saves and stops with exit status 4 (docs/failures.md)."""
    hang_timeout: float | None = option(600.0, resume="free", gt=0)
    """Seconds without a sign of life after which a rollout replica counts as dead; null for
    none."""
    deterministic: bool = option(False, resume="logged")
    """The same seed on the same machine gives the same metrics, bit for bit on CPU: each engine
    decodes one dialogue at a time, which is slow (docs/determinism.md); to compare runs by."""
    memory_preflight: str = option("refuse", resume="free", choices=("refuse", "warn", "off"))
    """What an estimate that this machine has not the memory for leads to: refuse, warn, off."""
    memory_watch_seconds: float = option(5.0, resume="free", ge=0)
    """Seconds between two looks at the host's memory during a run; 0 never looks."""
    memory_low: float = option(0.1, resume="free", ge=0, le=1)
    """Free share of the host's memory below which a line says what uses it; Ray kills at 0.05."""
    guard: GuardConfig = field(default_factory=GuardConfig)
