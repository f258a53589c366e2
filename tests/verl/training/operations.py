"""Notes the operations of a pass, and those among them that no GPU repeats to the bit."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RAISING = (
    "avg_pool3d", "adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool", "max_unpool",
    "upsample", "reflection_pad", "nll_loss", "ctc_loss", "_ctc_loss", "_embedding_bag", "histc",
    "bincount", "median", "grid_sampler", "kthvalue",
)  # fmt: skip
"""Beginnings of names of what `torch.use_deterministic_algorithms` raises for on CUDA."""


class Seen(TorchDispatchMode):
    """All operations by name, backward included; `refused` are those that strict mode raises for.

    Sums along an axis that keep every step are allowed of whole numbers, `put` never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names.add(name)
        is_real = isinstance(found, torch.Tensor) and found.is_floating_point()
        if (
            name.startswith(RAISING)
            or name in ("put", "put_")
            or (name.startswith("cumsum") and is_real)
            or (name.startswith("scatter_reduce") and "prod" in args)
        ):
            self.refused.add(name)
        return found
