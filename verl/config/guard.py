"""The collapse guard: what it watches, how much it bears, what it does."""

from __future__ import annotations

from dataclasses import dataclass

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
