"""The dispatch mode of a pretended card: CUDA tensors have shape and dtype but no numbers.

CPU tensors are real. What mixes devices is an error, as on a card, and so is a collective whose
tensor lies on a device that the process group has no backend for. What would cost time on a card
is counted: waits of the host for the device, copies between them, collectives.
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
"""Sees each operation on CUDA tensors: the operation, its arguments, its result."""


@dataclass
class Costs:
    """What would take time on a card, since the last `take`."""

    syncs: collections.Counter[str] = field(default_factory=collections.Counter)
    """Waits of the host, by kind and by the line of `verl` that asked."""
    collectives: collections.Counter[str] = field(default_factory=collections.Counter)
    collective_bytes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Of the largest tensor of each collective."""
    bytes_to_device: int = 0
    bytes_to_host: int = 0

    def take(self) -> dict[str, Any]:
        """The counts so far, which begin anew."""
        found = {name: value if isinstance(value, int) else dict(value)
                 for name, value in vars(self).items()}  # fmt: skip
        self.__init__()
        return found


class PretendCuda(TorchDispatchMode):
    """Inside this mode the product's code runs as on a card."""

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
            return NotImplemented  # DTensor comes back with its local tensors
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor works out shapes in a fake mode of its own
        if not any(map(is_pretended, tree_leaves((args, kwargs)))):
            if func.namespace in COLLECTIVES:
                check_devices(args, kwargs)
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES:
            check_devices(args, kwargs)
            self._count_collective(func, args)
        answer = self._answer(func, args, kwargs)
        if answer is not None:
            return answer
        with self.fake:
            result = func(*args, **kwargs)
        if self.watcher is not None:
            self.watcher(func, args, kwargs, result)
        return result

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where values leave the device or come to it; None for all other operations."""
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
        """Ones, so that no loss or norm looks as if it were not finite."""
        if not kwargs.get("non_blocking"):
            self._wait("copy to host")
        self.costs.bytes_to_host += source.nbytes
        dtype = kwargs.get("dtype") or source.dtype
        if source.nbytes < 1 << 24:
            return torch.ones(source.shape, dtype=dtype)
        with self.fake:  # shards of large models: their numbers would fill the machine
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

    def _wait(self, what: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and "/verl/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = frame.f_code.co_filename.rpartition("/verl/")[2] if frame is not None else "torch"
        function = f":{frame.f_code.co_name}" if frame is not None else ""
        self.costs.syncs[f"{what} in {place}{function}"] += 1


def is_pretended(value: Any) -> bool:
    """Whether an argument is a CUDA tensor, or names the device."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, FakeTensor)


def check_devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise as torch does when a collective's tensor is on a device without a backend."""
    group = dist.distributed_c10d._get_default_group()
    served = {device.type for device in group._device_types}
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.device.type not in served:
            raise RuntimeError(f"No backend type associated with device type {value.device.type}")
