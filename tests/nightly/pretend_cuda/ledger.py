"""Accounting of simulated device memory (bytes in use, and their peak) and of FLOPs."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


class Ledger:
    """Tracks the storages that operations create; pass it to `PretendCuda` as watcher."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.flops: collections.Counter[str] = collections.Counter()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._track_resizing()

    def _track_resizing(self) -> None:
        """Patch `resize_`: FSDP frees gathered weights by resizing their storage to 0 bytes."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if id(storage) in self._sizes:
                self._add(size - self._sizes[id(storage)])
                self._sizes[id(storage)] = size
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.track(tree_leaves(result))
        self._count_flops(func.__name__.partition(".")[0], args)

    def track(self, values: Iterable[Any]) -> None:
        """Count the storages of CUDA tensors among `values` that are not tracked yet."""
        for value in values:
            value = getattr(value, "_local_tensor", value)
            if isinstance(value, FakeTensor) and value.device.type == "cuda":
                self._track(value.untyped_storage())

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._add(storage.nbytes())

        def on_free(_: object) -> None:
            self._add(-self._sizes.pop(key))
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, on_free)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _count_flops(self, name: str, args: Any) -> None:
        match name:
            case "mm" | "addmm" | "bmm":
                left, right = args[-2:] if name != "addmm" else args[1:3]
                self.flops["products"] += 2 * left.numel() * right.shape[-1]
            case "_varlen_attn":
                self.flops["attention"] += 2 * _scores(args[0], args[5])
            case "_varlen_attn_backward":
                self.flops["attention"] += 5 * _scores(args[1], args[8])


def _scores(query: Tensor, longest: int) -> int:
    """Count the FLOPs of causal scores of queries (num_tokens, heads, head_dim).

    All sequences have the length `longest`.
    """
    return query.numel() * longest
