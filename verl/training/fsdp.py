"""A model over all ranks by FSDP2, its optimizer and schedule, and packed micro-batches.

What is trained, its gradients and optimizer state are float32; forward and backward compute in the
compute dtype, in float16 with a scaled loss. What the model answers and what is learned from it is
left to actor and critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.config import FsdpConfig, OptimConfig
from verl.packing import Packing
from verl.training.kernels import compile_seconds
from verl.training.loading import fill_shards, take_values
from verl.training.sequence_parallel import SequenceParallelGroup
from verl.types import TokenBatch

MAX = dist.ReduceOp.MAX
SCHEDULES = ("constant", "linear", "cosine")
GROWTH_INTERVAL = 2000
"""Finite gradients in a row after which a larger factor of the loss is tried."""


@dataclass(frozen=True)
class FsdpOptions:
    """How one model is held and learned."""

    compute_dtype: torch.dtype
    """Forward and backward; weights stay float32."""
    num_updates: int = 0
    """Optimizer steps of the run, which the schedule spans."""
    optim: OptimConfig | None = None
    """None for a frozen model."""
    grad_clip: float = 1.0
    """Bound on the norm of the gradient over all ranks."""
    schedule: str = "constant"
    """After the warm-up: constant, or linear or cosine to 0 at `num_updates`."""
    fsdp: FsdpConfig = field(default_factory=lambda: FsdpConfig(False, False))
    """What leaves the device between uses."""
    sp_group: SequenceParallelGroup | None = None
    """Group of ranks that compute each micro-batch together; None where each computes its own."""

    def __post_init__(self) -> None:
        assert None not in vars(self.fsdp).values(), "null is decided before ranks start"


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    """Norm over all ranks, before clipping and without the loss's scale."""
    lr: float
    is_skipped: bool
    """The loss or gradient was not finite: weights and optimizer are as they were."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None where float16 is not computed in."""
    is_overflow: bool = False
    """Skipped for the scale alone, which is halved: nothing is wrong with the run."""

    @property
    def is_faulty(self) -> bool:
        """Skipped for a loss or gradient that no smaller scale would mend."""
        return self.is_skipped and not self.is_overflow

    def metrics(self, model: str) -> dict[str, float]:
        """What trackers get of it; the norm of an overflow is not known."""
        found = {"lr": self.lr, "skipped_updates": float(self.is_faulty)}
        if not self.is_overflow:
            found["grad_norm"] = self.grad_norm
        if self.loss_scale is not None:
            found["loss_scale"] = self.loss_scale
            found["overflowed_updates"] = float(self.is_overflow)
        return {f"{model}/{name}": value for name, value in found.items()}


@dataclass
class LossScale:
    """The factor of one model's loss, by the rule and the constants of `torch.amp.GradScaler`.

    Below 6e-8 a float16 is 0, above 65,504 infinite. So the loss is multiplied before backward, and
    the gradient, which FSDP sums in float32, divided again before anything looks at it.
    """

    value: float = 65536.0
    """A power of two always, so that dividing by it rounds nothing."""
    num_finite: int = 0
    """Finite gradients in a row with this factor."""

    def observe(self, is_finite: bool) -> None:
        """Halve after a gradient that is not finite, double after enough that are."""
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
        elif self.num_finite == GROWTH_INTERVAL:
            self.value, self.num_finite = self.value * 2, 0


@dataclass
class FsdpModel:
    """One model over all ranks. `module` is sharded in place; every rank makes the same calls."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    device: torch.device
    options: FsdpOptions
    float32_modules: Sequence[nn.Module] = ()
    """Parts that compute in float32 whatever the compute dtype."""
    twin: InitVar[FsdpModel | None] = None
    """A model of the same weights, whose shards are copied; None to take the module's own."""
    optimizer: torch.optim.Optimizer | None = field(init=False, default=None)
    num_updates_done: int = field(init=False, default=0)
    """Updates so far, the skipped ones too: where the schedule is."""
    lr_scale: float = field(init=False, default=1.0)
    """What the configured learning rate is multiplied by, from the next update on."""
    loss_scale: LossScale | None = field(init=False, default=None)
    """Of a model that is trained in float16."""
    _compiled_s: float = field(init=False, default_factory=compile_seconds)

    def __post_init__(self, twin: FsdpModel | None) -> None:
        if not isinstance(self.module, FSDPModule):
            if self.options.optim is None:
                self.module.requires_grad_(False)
            self._shard(twin)
            self.module.train()
        if self.options.optim is not None:
            self._build_optimizer(self.options.optim)

    def forward(self, *arguments: Any) -> Any:
        """What the module answers."""
        return self.module(*arguments)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained and saved here, by name."""
        return dict(self.module.named_parameters())

    def adapter_record(self) -> dict[str, Any]:
        """What a checkpoint must know apart from these, as JSON."""
        return {}

    def _shard(self, twin: FsdpModel | None) -> None:
        def shard(module: nn.Module, dtype: torch.dtype) -> None:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            fully_shard(
                module, mesh=mesh, mp_policy=policy, **offload,
                reshard_after_forward=None if spreads else False,
            )  # fmt: skip

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        spreads = self.options.fsdp.reshard_each and mesh.size() > 1
        on_host = self.options.fsdp.param_offload and self.device.type == "cuda"
        offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if on_host else {}
        values = take_values(self.module)
        if twin is not None:
            twin.reshard()
            values = [parameter.detach() for parameter in twin.module.parameters()]
        for block in self.blocks:
            shard(block, self.options.compute_dtype)
        for part in self.float32_modules:
            shard(part, torch.float32)
        shard(self.module, self.options.compute_dtype)
        fill_shards(self.module, values, torch.device("cpu") if on_host else self.device)

    def _build_optimizer(self, optim: OptimConfig) -> None:
        parameters = list(self.trained_parameters().values())
        self.optimizer = torch.optim.AdamW(
            parameters, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay, fused=True,
        )  # fmt: skip
        # Made now rather than at the first step, so that a checkpoint always has a place for it.
        # torch's get_optimizer_state_dict would make it by a step without gradients, which counts
        # as one: the bias correction of the first real step would be that of a second.
        for parameter in parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        if self.options.compute_dtype is torch.float16:
            self.loss_scale = LossScale()
        self._move_optimizer(torch.device("cpu"))

    def reshard(self) -> None:
        """Free gathered weights: a forward without backward leaves some, in the compute dtype.
        Until then `module.parameters()` are the gathered copies, not the weights."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def sp_size(self) -> int:
        """Ranks that compute the same micro-batches, and the same loss."""
        return 1 if self.options.sp_group is None else self.options.sp_group.size

    def micro_batches(self, batch: TokenBatch, budget: int) -> list[tuple[list[int], TokenBatch]]:
        """Micro-batches of at most `budget` computed tokens, as (sequence indices, sequences). All
        ranks get the same number, so some may be empty."""
        packing, every = Packing.of(batch), range(len(batch))
        needed = len(packing.micro_batches(every, budget)) if len(batch) else 0
        count = int(all_reduced(torch.tensor([float(needed)]), self.device, MAX)[0])
        bins = packing.micro_batches(every, budget, at_least=max(count, 1))
        return [(indices, batch.select(indices)) for indices in bins]

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        """Add the gradient of this rank's share of the loss; shares add up over ranks, without
        `reshard_each` with an update's last micro-batch. The ranks of a sequence-parallel group
        have the same share, and each the gradient that its slice adds to it."""
        if not self.options.fsdp.reshard_each:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(is_last)
            self.module.set_reshard_after_backward(is_last)
        # FSDP averages over ranks, the gradient is a sum over them.
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        (loss * (dist.get_world_size() * scale)).backward()

    def step(self, is_finite: bool = True) -> StepResult:
        """Clip and apply the gradient, unless it or the loss (`is_finite`, the same on all ranks)
        is not finite. The schedule moves on in any case; a gradient of float16 that is not finite
        halves the loss's scale.
        """
        assert self.optimizer is not None, "the model is frozen"
        self.reshard()
        scale = self.loss_scale.value if self.loss_scale is not None else None
        learned = list(self.trained_parameters().values())
        if scale is not None:
            for gradient in (p.grad for p in learned if p.grad is not None):
                gradient.div_(scale)
        total = nn.utils.clip_grad_norm_(learned, self.options.grad_clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        is_skipped = not (is_finite and math.isfinite(norm))
        lr = self.lr
        if not is_skipped:
            self._move_optimizer(self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            if self.options.fsdp.optimizer_offload:
                self._move_optimizer(torch.device("cpu"))
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates_done += 1
        is_overflow = False
        if self.loss_scale is not None and is_finite:
            is_overflow = is_skipped and self.loss_scale.value > 1
            self.loss_scale.observe(not is_skipped)
        return StepResult(norm, lr, is_skipped, scale, is_overflow)

    def take_compile_seconds(self) -> float:
        """What this process has compiled since the last call."""
        before, self._compiled_s = self._compiled_s, compile_seconds()
        return self._compiled_s - before

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        optim, total = self.options.optim, self.options.num_updates
        assert optim is not None, "the model is frozen"
        num_warmup = math.ceil(optim.lr_warmup_steps_ratio * total)
        share = lr_factor(self.num_updates_done, num_warmup, total, self.options.schedule)
        return optim.lr * self.lr_scale * share

    def _move_optimizer(self, device: torch.device) -> None:
        held = self.options.fsdp
        if self.optimizer is None or not held.optimizer_offload or held.param_offload:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device, non_blocking=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """What is trained, and its optimizer state, sharded; for checkpoints to read and fill."""
        self.reshard()
        if self.device.type == "cuda":  # what is offloaded may still be on its way to the host
            torch.cuda.synchronize(self.device)
        named = self.trained_parameters()
        found = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        if self.optimizer is not None:
            for name, parameter in named.items():
                for key, value in self.optimizer.state[parameter].items():
                    found[f"optimizer.{name}.{key}"] = value
        return found

    def full_parameters(
        self, prefix: str = "", keep: Callable[[str], bool] = bool,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Name and whole tensor, as `dtype`, of each parameter below `prefix` that `keep` accepts;
        tied ones come once. Every rank must run the iteration to its end."""
        self.reshard()
        for name, parameter in self.module.named_parameters():
            if name.startswith(prefix) and keep(name):
                yield name.removeprefix(prefix), self._whole(parameter, dtype)

    def full_trained_parameters(self) -> dict[str, Tensor]:
        """Name and whole tensor of each parameter that is trained here, on every rank."""
        self.reshard()
        return {
            name: self._whole(parameter) for name, parameter in self.trained_parameters().items()
        }

    def _whole(self, parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # The shard is cast, not the whole: half of the bytes go between ranks.
        tensor = parameter.detach().to(dtype or parameter.dtype)
        tensor = tensor.to(self.device) if tensor.device != self.device else tensor
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def lr_factor(step: int, num_warmup: int, num_updates: int, schedule: str) -> float:
    """Share of the peak learning rate in update `step` (from 0): linear warm-up, then schedule. The
    first update already learns: warm-up over w updates runs 1/w, 2/w … 1."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min((step - num_warmup) / max(num_updates - num_warmup, 1), 1.0)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        case _:
            raise ValueError(f"got schedule {schedule!r}; expected one of {', '.join(SCHEDULES)}")


def all_reduced(
    x: Tensor, device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Sum (or `op`) over ranks, as a CPU tensor; the argument is left as it is."""
    copy = x.detach().clone().to(device)
    dist.all_reduce(copy, op)
    return copy.cpu()
