"""Options of the run as a whole: devices, length, checkpoints, validation, logging, failures."""

from dataclasses import dataclass, field
from typing import Any

from verl.bounds import MAX_SEED
from verl.config.option import option

PATIENCE = "patience"


@dataclass
class GuardConfig:
    """The collapse guard, which checks every training step (docs/guides/guard.md)."""

    action: str = option("warn", resume="free", choices=("off", "warn", "stop"))
    """Reaction to a collapse: warn (log only) or stop (exit status 3); off checks nothing."""
    limits: dict[str, Any] = option(factory=dict, resume="free")
    """Other limits for rules of docs/guides/guard.md, by name; null turns a rule off:
    {search_share: null, drift_drop: 0.5}. `patience` (3) is the number of consecutive steps beyond
    a limit that count as a collapse."""

    @property
    def patience(self) -> int:
        """Consecutive steps beyond a limit that count as a collapse."""
        patience: int = self.limits.get(PATIENCE, 3)
        return patience


@dataclass
class TrainerConfig:
    """The run: devices, length, checkpoints, validation, logging, failures."""

    project_name: str = option("Search-R1", resume="free")
    """Project under which trackers file the run."""
    experiment_name: str = option("default", resume="free")
    """Name of the run in trackers and folders."""
    logger: Any = option(
        factory=lambda: ["console", "jsonl"],
        resume="free",
        choices="verl.monitor.tracking:BACKENDS",
        or_file=True,
    )
    """Trackers of docs/guides/watching.md, or `path/file.py:Name`: a name or a list."""
    hooks: list[str] = option(factory=list, resume="free")
    """Hooks of the user's, each `path/file.py:Name`, called at the moments of a step
    (docs/guides/watching.md)."""
    default_local_dir: str = option(
        "runs/${trainer.project_name}/${trainer.experiment_name}", resume="free"
    )
    """Folder of the run: checkpoints, metrics and the resolved configuration."""
    rollout_data_dir: str | None = option(None, resume="free")
    """Folder that records every scored training trajectory, one jsonl file per step, for
    `verl.trainer.rejection_sampling` and `data.rollouts`; null records none."""
    device: str = option("auto", resume="free", choices=("auto", "cuda", "cpu"))
    """Device: auto (cuda if available), cuda or cpu."""
    compute_dtype: str = option("auto", resume="logged", choices=("auto", "bfloat16", "float32"))
    """Number format of forward and backward passes: auto (bfloat16 where the device supports it,
    else float32), bfloat16 or float32. Master weights are always float32."""
    share_prompts: bool = option(True, resume="logged")
    """Compute what dialogues of a group begin with alike, sampled tokens too, only once in forward
    passes and updates, where that saves a twentieth of the step's tokens; gradients differ only by
    rounding."""
    n_gpus_per_node: int = option(8, resume="free", ge=1)
    """Training ranks per node: GPUs, or processes on CPU."""
    trace: bool = option(False, resume="free")
    """Write a timeline of trainer, engines and trajectories to `trace.json` for Perfetto, and have
    vLLM report how long requests waited for a slot."""
    rollout_gpus: int = option(0, resume="free", ge=0)
    """GPUs per node (on CPU: cores) reserved for engines, in addition to those of the ranks; the
    engines then never sleep. 0 shares the GPUs of the ranks."""
    nnodes: int = option(1, resume="free", ge=1)
    """Nodes of the Ray cluster that hold training ranks."""
    node_timeout: float = option(600.0, resume="free", ge=0)
    """Seconds that a run waits for its nodes, at the start and after it lost one, and that ranks
    wait for each other (at least torch's own 600 with NCCL, 1,800 with gloo)."""
    total_epochs: int = option(15, resume="free", ge=1)
    """Passes over the training rows; used if `total_training_steps` is null."""
    total_training_steps: int | None = option(None, resume="free", ge=1)
    """Training steps of the run; null derives them from `total_epochs`."""
    critic_warmup: int = option(0, resume="logged", ge=0)
    """Number of first steps that train only the critic."""
    save_freq: int = option(-1, resume="free", ge=-1)
    """Steps between checkpoints; -1 saves only at the end, 0 never. A run that is interrupted saves
    in any case (docs/guides/long_runs.md)."""
    save_minutes: float | None = option(None, resume="free", gt=0)
    """Also save at the first step end this many minutes after the last checkpoint; null: never."""
    keep_last: int | None = option(None, resume="free", ge=1)
    """Newest checkpoints to keep (the guard and `keep_best` may keep others); null keeps all."""
    keep_best: int = option(1, resume="free", ge=0)
    """Further checkpoints to keep: the validated ones with the highest `best_metric`."""
    best_metric: str = option("val/score", resume="free")
    """Validation metric that ranks checkpoints; higher is better. Checked before the run."""
    time_limit: float | None = option(None, resume="free", gt=0)
    """Minutes after which the process must end: the run saves and stops when another step might not
    fit. null uses SLURM_JOB_END_TIME if Slurm sets it."""
    test_freq: int = option(-1, resume="free", ge=-1)
    """Steps between validations; -1 validates only at start and end, 0 never after the start."""
    val_before_train: bool = option(True, resume="free")
    """Validate before the first step."""
    val_only: bool = option(False, resume="free")
    """Validate, then stop."""
    resume_mode: str = option("disable", resume="free", path="checkpoint")
    """Checkpoint to resume from: disable, auto (the latest complete one, if any), or a path."""
    resume_anyway: list[str] = option(factory=list, resume="free")
    """Accepted differences from the checkpoint, as the refusal names them: data, corpus …"""
    seed: int = option(0, resume="experiment", ge=0, le=MAX_SEED)
    """Random seed of data order, sampling and the initial value head."""
    max_restarts: int = option(3, resume="free", ge=0)
    """Maximum number of lost processes from which a run recovers. 0 ends the run at the first loss
    (docs/guides/long_runs.md)."""
    max_lost_share: float = option(0.02, resume="free", ge=0, le=1)
    """Maximum share of a step's trajectories, or of a validation's rows, lost to tool calls that
    fail for good; beyond it the run saves and stops with status 4 (docs/guides/long_runs.md)."""
    deterministic: bool = option(False, resume="logged")
    """Same metrics for the same seed on the same machine, bit for bit on CPU; for comparing runs.
    Slow: each engine decodes one dialogue at a time (docs/guides/long_runs.md)."""
    memory_preflight: str = option("refuse", resume="free", choices=("refuse", "warn", "off"))
    """Reaction when the memory estimate says that this machine lacks the memory for the run: refuse
    to start or warn; off skips the estimate."""
    canary: bool = option(True, resume="free")
    """After each transfer of weights, stop the run if an engine lacks the new ones
    (docs/guides/guard.md)."""
    guard: GuardConfig = field(default_factory=GuardConfig)
