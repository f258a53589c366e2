"""The dispatch mode of a simulated GPU: CUDA tensors have a shape and dtype but no values.

CPU tensors are real. Mixing devices is an error, as on a GPU, and so is a collective with a tensor
on a device that the process group has no backend for. What would cost time on a GPU is counted:
waits of the host for the device, copies between them, and collectives.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = torch.ops.aten
COLLECTIVES = ("c10d", "_c10d_functional")
PLAIN = (Tensor, FakeTensor, torch.nn.Parameter)
Watcher = Callable[[Any, Any, Any, Any], None]
"""Called for each operation on CUDA tensors, with its function, args, kwargs and result."""


@dataclass
class Costs:
    """Counts of what would take time on a GPU, since the last `take`."""

    syncs: collections.Counter[str] = field(default_factory=collections.Counter)
    """Waits of the host, by kind and by the function in `verl` that waited."""
    collectives: collections.Counter[str] = field(default_factory=collections.Counter)
    collective_bytes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Bytes of the largest tensor of each collective."""
    bytes_to_device: int = 0
    bytes_to_host: int = 0

    def take(self) -> dict[str, Any]:
        """Return the counts and reset them."""
        counts = {name: value if isinstance(value, int) else dict(value)
                  for name, value in vars(self).items()}  # fmt: skip
        self.__init__()
        return counts


class PretendCuda(TorchDispatchMode):
    """Within this mode, code runs as on a GPU."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.costs = Costs()
        self.watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(t not in PLAIN and hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor calls again with its local tensors
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor infers shapes in its own fake mode
        if not any(map(is_simulated, tree_leaves((args, kwargs)))):
            if func.namespace in COLLECTIVES:
                check_devices(args, kwargs)
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES:
            check_devices(args, kwargs)
            self._count_collective(func, args)
        transferred = self._transfer(func, args, kwargs)
        if transferred is not None:
            return transferred
        with self.fake:
            result = func(*args, **kwargs)
        if self.watcher is not None:
            self.watcher(func, args, kwargs, result)
        return result

    def _transfer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run operations that move values to or from the device; return None for all others."""
        first = args[0] if args else None
        match func:
            case ATEN._local_scalar_dense.default:
                self._wait("item")
                kind = bool if first.dtype is torch.bool else float
                return kind(1) if kind is bool or first.is_floating_point() else 1
            case ATEN.nonzero.default if isinstance(first, FakeTensor):
                self._wait("nonzero")
                shape = (max(1, first.numel() // 2), first.dim())
                with self.fake:
                    return torch.zeros(shape, dtype=torch.int64, device=first.device)
            case ATEN._to_copy.default if isinstance(first, FakeTensor):
                target = kwargs.get("device")
                if first.device.type == "cuda" and target and torch.device(target).type == "cpu":
                    return self._to_host(first, kwargs)
            case ATEN._to_copy.default:
                return self._to_device(first, kwargs)
            case ATEN.copy_.default if not isinstance(first, FakeTensor):
                self._wait("copy to host")
                self.costs.bytes_to_host += first.nbytes
                return first
            case ATEN.copy_.default if not isinstance(args[1], FakeTensor):
                self.costs.bytes_to_device += first.nbytes
                return first
        return None

    def _to_host(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return ones, so that losses and norms are finite."""
        if not kwargs.get("non_blocking"):
            self._wait("copy to host")
        self.costs.bytes_to_host += source.nbytes
        dtype = kwargs.get("dtype") or source.dtype
        if source.nbytes < 1 << 24:
            return torch.ones(source.shape, dtype=dtype)
        with self.fake:  # shards of large models would not fit into memory
            return torch.empty(source.shape, dtype=dtype, device="cpu")

    def _to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if not kwargs.get("non_blocking"):
            self._wait("copy to device")
        self.costs.bytes_to_device += source.nbytes
        dtype = kwargs.get("dtype") or source.dtype
        with self.fake:
            return torch.empty_strided(
                source.shape, source.stride(), dtype=dtype, device=kwargs["device"]
            )

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.__name__.partition(".")[0].strip("_")
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
        self.costs.collectives[name] += 1
        self.costs.collective_bytes[name] += max(sizes, default=0)

    def _wait(self, kind: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and "/verl/" not in frame.f_code.co_filename:
            frame = frame.f_back
        file = frame.f_code.co_filename.rpartition("/verl/")[2] if frame is not None else "torch"
        function = f":{frame.f_code.co_name}" if frame is not None else ""
        self.costs.syncs[f"{kind} in {file}{function}"] += 1


def is_simulated(value: Any) -> bool:
    """Return whether an argument is a simulated CUDA tensor or a CUDA device."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, FakeTensor)


def check_devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise torch's error if a collective's tensor is on a device without a backend."""
    group = dist.distributed_c10d._get_default_group()
    served = {device.type for device in group._device_types}
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.device.type not in served:
            raise RuntimeError(f"No backend type associated with device type {value.device.type}")
