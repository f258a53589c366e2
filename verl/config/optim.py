"""What actor and critic share: optimizer and offloading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OptimConfig:
    """AdamW and its schedule (linear warm-up, then constant)."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = 0.0
    """Share of all optimizer steps over which lr rises linearly from 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""


@dataclass
class FsdpConfig:
    """What leaves the device between uses; without effect on CPU.

    What is null is chosen before the run starts: on, where the memory estimate says that the device
    has not the room (`verl.preflight.memory.offload`), and where nothing can be estimated.
    """

    param_offload: bool | None = None
    """Keep parameters, gradients and optimizer state on the host (FSDP2's CPU offload), which costs
    seconds a step; null where the device has not the room for them."""
    grad_offload: bool = False
    """No effect any more: gradients go with `param_offload`."""
    optimizer_offload: bool | None = None
    """Move optimizer state to the host between updates; null where the device has not the room."""
