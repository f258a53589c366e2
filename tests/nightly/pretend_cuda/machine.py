"""A simulated machine with GPUs: fake functions of `torch.cuda`, and the guard autograd needs.

`install` patches torch for the whole process, so it must run in a separate process.
"""

from __future__ import annotations

import collections
import contextlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from verl.ext.flash_attention import cuda_kernel

GUARD = Path(__file__).with_name("guard.cpp")
CAPABILITIES = {"bfloat16": (9, 0), "float16": (7, 0)}
"""Compute capability of a GPU by its best 16-bit dtype."""
CALLS: collections.Counter[str] = collections.Counter()
"""Number of calls of functions that cost time on a GPU."""


class Stream:
    """The only stream; all its work is always finished."""

    device = torch.device("cuda", 0)
    stream_id = device_index = cuda_stream = 0
    device_type = 1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        CALLS["synchronize"] += 1

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event on the stream that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        CALLS["synchronize"] += 1

    def query(self) -> bool:
        return True


def build_guard(folder: Path) -> Path:
    """Compile guard.cpp against this torch; return the library's path."""
    library, torch_folder = folder / "guard.so", Path(torch.__file__).parent
    command = [
        "g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(GUARD), "-o", str(library),
        f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library


def install(num_devices: int, dtype: str) -> None:
    """Let `torch.cuda` behave as with `num_devices` GPUs whose best 16-bit dtype is `dtype`."""
    cuda, stream = torch.cuda, Stream()
    results: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": num_devices,
        "current_device": 0, "init": None, "_lazy_init": None, "set_device": None,
        "current_stream": stream, "default_stream": stream, "set_stream": None,
        "manual_seed": None, "manual_seed_all": None, "set_rng_state": None,
        "get_device_capability": CAPABILITIES[dtype], "get_device_name": "Simulated GPU",
        "mem_get_info": (140 << 30, 141 << 30), "ipc_collect": None,
        "get_device_properties": SimpleNamespace(uuid="GPU-0"),
    }  # fmt: skip
    for name, result in results.items():
        setattr(cuda, name, lambda *_, _result=result, **__: _result)
    cuda.is_bf16_supported = lambda including_emulation=True: (
        including_emulation or dtype == "bfloat16"
    )
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.synchronize = lambda *_: CALLS.update(["synchronize"])
    cuda.empty_cache = lambda: CALLS.update(["empty_cache"])
    # Pinning needs a driver; here pinned memory is plain memory.
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda *_: False
    FakeTensor.__deepcopy__ = lambda self, _: self.clone()  # torch's version reads the storage
    torch.nn.Module._apply = apply_to_tensors
    cuda_kernel.cache_clear()  # the choice depends on the GPU


def apply_to_tensors(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Replace `nn.Module._apply` by a version that creates new parameters.

    A fake tensor cannot replace the data of a real parameter. Tied parameters stay tied.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            with torch.no_grad():
                new = change(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            changed[id(tensor)] = tensor, new  # keeps the old one, so that its id is not reused
        return changed[id(tensor)][1]

    for part in module.modules() if recurse else [module]:
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: replacement(x) for name, x in tensors.items() if x is not None})
    return module
