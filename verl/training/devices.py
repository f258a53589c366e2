"""Which device, number format and thread count a process computes with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config import Config
from verl.errors import ResourceError, explain

DETERMINISTIC_ENV = {
    # Matrix products that do not depend on where in memory their operands happen to lie.
    "MKL_CBWR": "AVX2,STRICT",
    # As many threads as were asked for, however busy the machine is.
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
    # cuBLAS picks kernels by the workspace that is free, unless that is fixed.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What a process must find in its environment to compute the same again, bit for bit."""
SPIN_COUNT = "1000"
"""GOMP_SPINCOUNT of a process that has its cores to itself: some ten microseconds of waiting."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Formats that models compute in and are written in, by the names that options give them."""


def device_type(name: str) -> str:
    """`auto` is cuda where there is such a device, else cpu; takes nothing of the device."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_surely_cpu(name: str) -> bool:
    """Whether `trainer.device` can mean no GPU: `auto` can, of a cluster whose driver has none."""
    return device_type(name) == "cpu" and not (name == "auto" and os.environ.get("RAY_ADDRESS"))


def resolve_device(name: str) -> torch.device:
    """This process's device of the named type."""
    found = device_type(name)
    if found == "cuda":
        return torch.device(found, torch.cuda.current_device())
    return torch.device(found)


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32 there, not merely possible."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device has units for it, else float16 on GPUs, float32 on CPU.
    Raises ValueError for another name."""
    if name == "auto":
        if has_bfloat16_units(device):
            return torch.bfloat16
        return torch.float16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def rollout_dtype(config: Config) -> str:
    """The format that engines compute in, and that weights are sent in."""
    name = config.actor_rollout_ref.rollout.dtype
    name = config.trainer.compute_dtype if name == "auto" else name
    device = torch.device(device_type(config.trainer.device))
    return dtype_name(resolve_dtype(name, device))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16: the name by which engines and files know it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes of a device that torch held at once in one process."""

    allocated: int
    """In tensors."""
    reserved: int
    """With what torch keeps for reuse."""


def take_peak_memory(device: torch.device, reader: Any = torch.cuda) -> PeakMemory | None:
    """The peak since the last call; None on CPU. `reader` answers as torch.cuda does."""
    if device.type != "cuda":
        return None
    peak = PeakMemory(reader.max_memory_allocated(device), reader.max_memory_reserved(device))
    reader.reset_peak_memory_stats(device)
    return peak


def card_name(device: torch.device) -> str:
    """torch's name for the device, empty on CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def make_deterministic() -> None:
    """Let torch take algorithms of this process that give the same bits each time.

    With a warning in place of an error, torch's attention would keep its faster backward, which
    adds up in any order. Call it before the process group is made, for NCCL to do without its sums
    inside of the switch.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` of the host on the device; the host goes on before it has arrived."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def cores_for(num_engine_cores: int, is_engine: bool) -> list[int]:
    """Of the cores that this process may use, the engines' or the ranks', which have the others.
    Raises ResourceError where the engines' leave none."""
    cores, key = sorted(os.sched_getaffinity(0)), "trainer.rollout_gpus"
    if num_engine_cores >= len(cores):
        got = f"{num_engine_cores} of {len(cores)} cores here for engines"
        expected, fix = "fewer: on CPU the ranks compute on the others", f"{key}={len(cores) // 2}"
        raise ResourceError(explain(key, got, expected, fix))
    return cores[:num_engine_cores] if is_engine else cores[num_engine_cores:]


def pin_to_cores(num_engine_cores: int, is_engine: bool) -> None:
    """Have this process, and those that it starts, compute on its side's cores alone."""
    set_affinity(cores_for(num_engine_cores, is_engine))


def set_affinity(cores: Sequence[int]) -> None:
    """Have this process, and those that it starts, compute on these cores alone."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    torch.set_num_threads(len(cores))


def share_threads(num_processes: int, num_beside: int = 0, comes_first: bool = True) -> None:
    """Give this process its share of the cores that it may use, as one of `num_processes`.

    `num_beside` others do something else meanwhile: where there is a core for each, they have cores
    of their own, before or behind these.
    """
    cores, together = sorted(os.sched_getaffinity(0)), num_processes + num_beside
    if num_beside and len(cores) >= together:
        first = num_processes if comes_first else num_beside
        cut = len(cores) * first // together
        set_affinity(cores[:cut] if comes_first else cores[cut:])
        together = num_processes
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // together))


def join_process_group(device: torch.device, rank: int, world_size: int) -> None:
    """Join the process group of all ranks; MASTER_ADDR and MASTER_PORT say where it meets."""
    if device.type == "cuda":  # gloo too: what is offloaded has its gradients in host memory
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", rank=rank, world_size=world_size, device_id=device
        )
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
