"""Records the operations of a pass, and which of them are not deterministic on GPUs."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RAISING = (
    "avg_pool3d", "adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool", "max_unpool",
    "upsample", "reflection_pad", "nll_loss", "ctc_loss", "_ctc_loss", "_embedding_bag", "histc",
    "bincount", "median", "grid_sampler", "kthvalue",
)  # fmt: skip
"""Prefixes of operations for which `torch.use_deterministic_algorithms` raises on CUDA."""


class OperationRecorder(TorchDispatchMode):
    """Records all operations by name, including backward; `refused` are the nondeterministic ones.

    Cumulative sums are allowed for integers only, `put` never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names.add(name)
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        if (
            name.startswith(RAISING)
            or name in ("put", "put_")
            or (name.startswith("cumsum") and is_float)
            or (name.startswith("scatter_reduce") and "prod" in args)
        ):
            self.refused.add(name)
        return result
