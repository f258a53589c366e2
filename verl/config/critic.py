"""The value function."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config.lora import AdapterConfig
from verl.config.optim import FsdpConfig, OptimConfig
from verl.config.option import option


@dataclass
class CriticModelConfig(AdapterConfig):
    """The critic's weights; with an adapter beside the policy's, both share one base."""

    path: str | None = option(None, resume="free")
    """Folder of the model whose trunk the critic starts from; null for the policy's."""
    enable_gradient_checkpointing: bool = option(True, resume="free")
    """As the policy's."""
    use_remove_padding: bool = option(True, resume="free")
    """No effect any more: batches are never padded."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass
class CriticConfig:
    """The value function; used by adv_estimator=gae only."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_micro_batch_size: int | None = option(None, resume="free", ge=1)
    """As the actor's."""
    ppo_max_token_len_per_gpu: int | None = option(None, resume="free", ge=1)
    """As the actor's; null for twice the actor's."""
    ppo_mini_batch_size: int | None = option(None, resume="experiment", ge=1)
    """Trajectories per critic step; null for the actor's."""
    ppo_epochs: int = option(1, resume="experiment", ge=1)
    """Passes over a step's trajectories."""
    grad_clip: float = option(1.0, resume="logged", gt=0)
    """Gradient norm bound."""
    cliprange_value: float = option(0.5, resume="logged", gt=0)
    """How far a value may move from the old one before its loss is clipped."""
