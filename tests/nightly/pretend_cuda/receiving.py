"""Weight transfer by CUDA IPC on a simulated GPU: rank and engine's worker are two threads.

A handle names a buffer's size and device in place of its memory. All else is the real code of both
sides: packing, messages, acknowledgements, and views into the buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.nightly.pretend_cuda.mode import PretendCuda
from verl.ext.transports import ipc
from verl.ext.transports import stream as streams
from verl.ext.transports.ipc import IpcSender
from verl.training.worker import TrainerWorker

STREAM = "simulated"
BUFFER_BYTES = 2**16
"""Size of the buffers in a trial, so small that a tiny model fills both of them several times."""
Facts = list[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each tensor."""


def reduce_buffer(buffer: Tensor) -> tuple[None, list[Any]]:
    """Replace torch's `reduce_tensor`, which needs CUDA memory that one process owns alone."""
    assert isinstance(buffer, FakeTensor) and buffer.device.type == "cuda", buffer.device
    assert buffer.is_contiguous() and buffer.storage_offset() == 0 and buffer._base is None
    arguments: list[Any] = [None] * (ipc.DEVICE_ARGUMENT + 1)
    arguments[0], arguments[ipc.DEVICE_ARGUMENT] = buffer.nbytes, buffer.device.index
    return None, arguments


def rebuild_buffer(*arguments: Any) -> Tensor:
    """Replace torch's `rebuild_cuda_tensor`."""
    device = torch.device("cuda", arguments[ipc.DEVICE_ARGUMENT])
    return torch.empty(arguments[0], dtype=torch.uint8, device=device)


@contextlib.contextmanager
def handles() -> Iterator[None]:
    """Let weight streams pass simulated handles of small buffers."""
    with (
        patch.object(ipc, "reduce_tensor", reduce_buffer),
        patch.object(ipc, "rebuild_cuda_tensor", rebuild_buffer),
        patch.object(streams, "BUFFER_BYTES", BUFFER_BYTES),
    ):
        yield


def describe(named: streams.NamedTensors) -> Facts:
    """Return the facts of tensors, all of which must be on the GPU."""
    found = []
    for name, tensor in named:
        assert tensor.device.type == "cuda", f"{name} is on {tensor.device}"
        found.append((name, str(tensor.dtype), tuple(tensor.shape)))
    return found


def receive(device: torch.device) -> Facts:
    """Receive all tensors as an engine's worker does."""
    with PretendCuda():
        return describe(ipc.receive(STREAM, device))


def send_weights(worker: TrainerWorker, dtype: str) -> Facts:
    """Send the policy to a worker on the rank's GPU; return what it received."""
    with handles(), ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, worker.device)
        IpcSender(worker).send(1, STREAM, dtype)
        return received.result()
