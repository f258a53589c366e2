"""A model sharded over all ranks by FSDP2, with its optimizer, schedule and micro-batches.

Trained parameters, gradients and optimizer state are float32; forward and backward use the compute
dtype. Outputs and losses are defined by actor and critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.batch import TokenBatch
from verl.config import FsdpConfig, OptimConfig
from verl.packing import Packing
from verl.plugins import imported
from verl.training.loading import fill_shards, take_values
from verl.training.models import PackedInputs

MAX = dist.ReduceOp.MAX
SHARING_SHARDS = "verl.ext.sequence_parallel:divide"
"""Import path of what lets ranks compute a share of a batch together, by other methods."""


@dataclass(frozen=True)
class FsdpOptions:
    """How a model is sharded and trained."""

    compute_dtype: torch.dtype
    """Dtype of forward and backward; trained weights stay float32."""
    num_updates: int = 0
    """Optimizer steps of the run, which the learning-rate schedule spans."""
    optim: OptimConfig | None = None
    """None for a frozen model."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    grad_clip: float = 1.0
    """Bound on the norm of the gradient over all ranks."""
    decay: Callable[[float], float] = lambda done: 1.0
    """Factor of the learning rate by the share of the updates after the warm-up that is done."""
    fsdp: FsdpConfig = field(default_factory=lambda: FsdpConfig(False, False))
    """What is offloaded or resharded between uses."""

    ranks_per_shard: int = 1
    """Ranks that get the same share of a batch, and compute it together."""

    def __post_init__(self) -> None:
        assert None not in vars(self.fsdp).values(), "null must be resolved before ranks start"


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step."""

    grad_norm: float
    """Norm over all ranks, before clipping."""
    lr: float
    is_faulty: bool
    """The loss or gradient was not finite: weights and optimizer are unchanged."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        return {
            "lr": self.lr,
            "skipped_updates": float(self.is_faulty),
            "grad_norm": self.grad_norm,
        }


class HostedAdamW:
    """AdamW with a learning-rate schedule, whose moments may wait in host memory between steps."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], options: FsdpOptions, device: torch.device
    ) -> None:
        optim = options.optim
        assert optim is not None, "the model is frozen"
        self._optim, self._options, self._device = optim, options, device
        self.num_updates_done = 0
        """Updates so far, including skipped ones: the position in the schedule."""
        self.adamw = torch.optim.AdamW(
            parameters,
            lr=optim.lr,
            betas=options.betas,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        # Created now rather than at the first step, so that a checkpoint can be loaded at any time.
        # torch's get_optimizer_state_dict would create it by a step without gradients, which it
        # counts: the first real step would get the bias correction of a second one.
        for parameter in parameters:
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._move_moments(torch.device("cpu"))

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        optim, total = self._optim, self._options.num_updates
        num_warmup = math.ceil(optim.lr_warmup_steps_ratio * total)
        # Linear warm-up over w updates: 1/w, 2/w … 1, so that the first update already learns.
        if self.num_updates_done < num_warmup:
            return optim.lr * ((self.num_updates_done + 1) / num_warmup)
        done = (self.num_updates_done - num_warmup) / max(total - num_warmup, 1)
        return optim.lr * self._options.decay(min(done, 1.0))

    def step(self, is_faulty: bool) -> None:
        """Apply the gradient unless it is faulty, and drop it; the schedule advances anyway."""
        if not is_faulty:
            self._move_moments(self._device)
            for group in self.adamw.param_groups:
                group["lr"] = self.lr
            self.adamw.step()
            self._move_moments(torch.device("cpu"))
        self.adamw.zero_grad(set_to_none=True)
        self.num_updates_done += 1

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Return a parameter's moments and number of steps, for checkpoints to read and fill."""
        state: Mapping[str, Tensor] = self.adamw.state[parameter]
        return state

    def _move_moments(self, device: torch.device) -> None:
        fsdp = self._options.fsdp
        if not fsdp.optimizer_offload or fsdp.param_offload:
            return
        for state in self.adamw.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device, non_blocking=True)


@dataclass
class FsdpModel:
    """A model whose `module` is sharded over all ranks, in place; all ranks make the same calls."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    device: torch.device
    options: FsdpOptions
    float32_modules: Sequence[nn.Module] = ()
    """Submodules that always compute in float32."""
    copy_from: InitVar[FsdpModel | None] = None
    """A model whose shards become this model's weights; None to keep the module's own weights."""
    optimizer: HostedAdamW | None = field(init=False, default=None)
    """None for a frozen model."""

    def __post_init__(self, copy_from: FsdpModel | None) -> None:
        if not isinstance(self.module, FSDPModule):
            if self.options.optim is None:
                self.module.requires_grad_(False)
            self._shard(copy_from)
            self.module.train()
        if self.options.optim is not None:
            trained = list(self.trained_parameters().values())
            self.optimizer = HostedAdamW(trained, self.options, self.device)
        if self.options.ranks_per_shard > 1:
            imported(SHARING_SHARDS)(self)

    def pack(self, batch: TokenBatch, mask: Tensor) -> PackedInputs:
        """Pack a micro-batch for `forward`; the tokens where `mask` is True are its targets."""
        return PackedInputs.of(batch, mask, self.device)

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this model trains and saves, by name."""
        return dict(self.module.named_parameters())

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records of the model beside its tensors, as JSON."""
        return {}

    def _shard(self, copy_from: FsdpModel | None) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        reshards = self.options.fsdp.reshard_each and mesh.size() > 1
        on_host = self.options.fsdp.param_offload and self.device.type == "cuda"
        offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if on_host else {}

        def shard(module: nn.Module, dtype: torch.dtype) -> None:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            fully_shard(
                module, mesh=mesh, mp_policy=policy, **offload,
                reshard_after_forward=None if reshards else False,
            )  # fmt: skip

        values = take_values(self.module)
        if copy_from is not None:
            copy_from.reshard()
            values = [parameter.detach() for parameter in copy_from.module.parameters()]
        for block in self.blocks:
            shard(block, self.options.compute_dtype)
        for part in self.float32_modules:
            shard(part, torch.float32)
        shard(self.module, self.options.compute_dtype)
        fill_shards(self.module, values, torch.device("cpu") if on_host else self.device)

    def reshard(self) -> None:
        """Free the gathered weights that a forward without backward leaves, in the compute dtype.

        Until then, `module.parameters()` are the gathered copies, not the sharded weights.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def micro_batches(self, batch: TokenBatch, budget: int) -> list[tuple[list[int], TokenBatch]]:
        """Divide a batch into micro-batches of at most `budget` computed tokens.

        Returns (sequence indices, sequences) of each: as many on all ranks, so some may be empty.
        """
        packing, sequences = Packing.of(batch), range(len(batch))
        needed = len(packing.micro_batches(sequences, budget))
        count = int(all_reduced(torch.tensor([float(needed)]), self.device, MAX)[0])
        bins = packing.micro_batches(sequences, budget, min_count=count)
        return [(indices, batch.select(indices)) for indices in bins]

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        """Add the gradient of this rank's share of the loss; the shares add up over ranks.

        Without `reshard_each`, gradients are reduced with the update's last micro-batch only. Ranks
        with the same share of the loss (`ranks_per_shard`) each add a part of its gradient.
        """
        if not self.options.fsdp.reshard_each:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(is_last)
            self.module.set_reshard_after_backward(is_last)
        # FSDP averages gradients over ranks, but the loss is a sum over them.
        (loss * dist.get_world_size()).backward()

    def step(self, is_finite: bool = True) -> StepResult:
        """Clip and apply the gradient, unless it or the loss is not finite.

        `is_finite` tells whether the loss is, and is the same on all ranks. The schedule advances
        in any case.
        """
        assert self.optimizer is not None, "the model is frozen"
        self.reshard()
        parameters = list(self.trained_parameters().values())
        total = nn.utils.clip_grad_norm_(parameters, self.options.grad_clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        is_faulty = not (is_finite and math.isfinite(norm))
        lr = self.optimizer.lr
        self.optimizer.step(is_faulty)
        return StepResult(norm, lr, is_faulty)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the sharded parameters and optimizer state, for checkpoints to read and fill."""
        self.reshard()
        if self.device.type == "cuda":  # copies of offloaded tensors to the host must be finished
            torch.cuda.synchronize(self.device)
        named = self.trained_parameters()
        tensors = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        if self.optimizer is not None:
            for name, parameter in named.items():
                for key, value in self.optimizer.state_of(parameter).items():
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def full_parameters(
        self, prefix: str = "", keep: Callable[[str], bool] = bool,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Yield the name, without `prefix`, and whole tensor of each parameter with that prefix.

        Only names that satisfy `keep` count, and tied parameters are yielded once. Every rank must
        run the iteration to its end.
        """
        self.reshard()
        for name, parameter in self.module.named_parameters():
            if name.startswith(prefix) and keep(name):
                yield name.removeprefix(prefix), self._whole(parameter, dtype)

    def policy_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and whole tensor of each weight of a policy, under Hugging Face's names.

        The caller casts them to `dtype`, unless they are already. Every rank must run the iteration
        to its end.
        """
        yield from self.full_parameters(prefix="lm.", dtype=getattr(torch, dtype))

    def full_trained_parameters(self) -> dict[str, Tensor]:
        """Gather each trained parameter, whole and by name, on every rank."""
        self.reshard()
        return {name: self._whole(value) for name, value in self.trained_parameters().items()}

    def _whole(self, parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # Cast before gathering: this halves the bytes that ranks exchange.
        tensor = parameter.detach().to(dtype or parameter.dtype).to(self.device)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_reduced(
    x: Tensor, device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Return the sum (or `op`) of `x` over all ranks as a new CPU tensor."""
    copy = x.detach().clone().to(device)
    dist.all_reduce(copy, op)
    return copy.cpu()
