"""The device and dtype that a process computes with."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl import cpu
from verl.training.network import joins_cluster

if TYPE_CHECKING:
    from verl.config import Config

DETERMINISTIC_ENV = {
    # Matrix products must not depend on the memory addresses of their operands.
    "MKL_CBWR": "AVX2,STRICT",
    # Use the configured number of threads even on a busy machine.
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    # cuBLAS chooses kernels by the free workspace, unless its size is fixed.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Environment of a process whose results are the same, bit for bit, in every run."""
COLLECTIVE_S = {"cuda": 600.0, "cpu": 1800.0}
"""Seconds that torch by itself lets ranks wait for each other, with NCCL and with gloo."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Dtypes that models are computed and written in, by their names in options."""


def device_type(name: str) -> str:
    """Resolve `auto` to cuda if a GPU is available, else cpu; allocates nothing on the device."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_surely_cpu(name: str) -> bool:
    """Return whether `trainer.device` rules out a GPU."""
    # `auto` does not in a Ray cluster: perhaps only the driver's node has no GPU.
    return device_type(name) == "cpu" and not (name == "auto" and joins_cluster())


def resolve_device(name: str) -> torch.device:
    """Return this process's device of the named type."""
    kind = device_type(name)
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def has_bfloat16_units(device: torch.device) -> bool:
    """Return whether the device has hardware for bfloat16, rather than emulating it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return cpu.has_bfloat16()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype by name. Raises ValueError for an unknown name.

    `auto` is bfloat16 where the device has hardware for it, else float32.
    """
    if name == "auto":
        return torch.bfloat16 if has_bfloat16_units(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def rollout_dtype(config: Config) -> str:
    """Return the name of the dtype that engines compute in, and that weights are sent in."""
    name = config.actor_rollout_ref.rollout.dtype
    return compute_dtype(config) if name == "auto" else dtype_name(DTYPES[name])


def compute_dtype(config: Config) -> str:
    """Return the name of the dtype that ranks compute in, in the process of one of them."""
    device = torch.device(device_type(config.trainer.device))
    return dtype_name(resolve_dtype(config.trainer.compute_dtype, device))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in engines and files: `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PeakMemory:
    """Peak bytes of device memory that torch held in one process."""

    allocated: int
    """Memory of tensors."""
    reserved: int
    """Memory of tensors and torch's cache."""


def take_peak_memory(device: torch.device, reader: Any = torch.cuda) -> PeakMemory | None:
    """Return the peak since the last call; None on CPU. `reader` has torch.cuda's functions."""
    if device.type != "cuda":
        return None
    peak = PeakMemory(reader.max_memory_allocated(device), reader.max_memory_reserved(device))
    reader.reset_peak_memory_stats(device)
    return peak


def card_name(config: Config) -> str:
    """Return torch's name of this process's GPU, empty on CPU."""
    device = resolve_device(config.trainer.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def make_deterministic() -> None:
    """Make torch use deterministic algorithms in this process.

    Errors, not warnings: with warnings, torch's attention would keep its faster backward, whose
    order of summation varies. Call it before the process group is created, so that NCCL does not
    reduce inside the network switch.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor `x` to the device, asynchronously on a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def device_id(device: torch.device) -> str:
    """Return an id of the device on which all processes agree: a GPU's UUID, or the host's."""
    if device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(device).uuid)


def join_process_group(
    device: torch.device, rank: int, world_size: int, timeout_s: float = 0.0
) -> None:
    """Join the process group of all ranks, at MASTER_ADDR and MASTER_PORT.

    Ranks wait for each other, in this call and in each collective, for `timeout_s` seconds, or for
    `COLLECTIVE_S` if that is longer.
    """
    timeout = timedelta(seconds=max(timeout_s, COLLECTIVE_S[device.type]))
    if device.type == "cuda":  # gloo as well: offloaded parameters have gradients in host memory
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", rank=rank, world_size=world_size, device_id=device,
            timeout=timeout,
        )  # fmt: skip
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
