"""What actor and critic share: optimizer and offloading."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.option import option


@dataclass
class OptimConfig:
    """AdamW and its schedule (linear warm-up, then constant)."""

    lr: float = option(1e-6, resume="logged", ge=0)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = option(0.0, resume="logged", ge=0, le=1)
    """Share of all optimizer steps over which lr rises linearly from 0."""
    weight_decay: float = option(0.01, resume="logged", ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = option((0.9, 0.999), resume="experiment")
    """AdamW's moment decays."""


@dataclass
class FsdpConfig:
    """What leaves the device between uses; without effect on CPU.

    What is null is chosen before the run starts: on, where the memory estimate says that the device
    has not the room (`verl.preflight.memory.offload`), and where nothing can be estimated.
    """

    param_offload: bool | None = option(None, resume="free")
    """Keep parameters, gradients and optimizer state on the host (FSDP2's CPU offload), which costs
    seconds a step; null where the device has not the room for them."""
    grad_offload: bool = option(False, resume="free")
    """No effect any more: gradients go with `param_offload`."""
    optimizer_offload: bool | None = option(None, resume="free")
    """Move optimizer state to the host between updates; null where the device has not the room."""
