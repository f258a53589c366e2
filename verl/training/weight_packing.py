"""Packing weights, one tensor behind the other, into buffers that engines copy them out of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BUFFER_BYTES = 256 << 20
"""Of each of the two buffers, unless one tensor is larger."""
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Bytes at which a tensor begins, for whatever dtype it has."""
PATIENCE_S = 60.0
"""Within which both sides meet."""

Named = Iterable[tuple[str, Tensor]]


class Packed(NamedTuple):
    """Where one tensor lies in a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass
class Sent:
    """What one hand-over cost."""

    seconds: float = 0.0
    """In which tensors were packed and sent, without those in which they came."""
    num_bytes: int = 0
    num_changed: int = 0
    """Elements that changed since the last hand-over, of `num_elements`; 0 of 0 where nobody
    looks."""
    num_elements: int = 0


def coming(
    named: Named, device: torch.device, dtype: torch.dtype, sent: Sent
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, on the device as `dtype`; what it took to come is taken off `sent.seconds`."""
    begin = time.perf_counter()
    for name, tensor in named:
        sent.seconds -= time.perf_counter() - begin
        yield name, tensor.to(device, dtype)
        begin = time.perf_counter()
    sent.seconds -= time.perf_counter() - begin


def pack(
    named: Named, new_buffer: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, Tensor, list[Packed]]]:
    """Fill buffers in turn: a slot's number, the bytes that were filled, and what lies in them.

    `new_buffer` makes a slot's memory, of so many bytes. A slot is filled again once the other one
    was given: until then every receiver must have what it held.
    """
    buffers: list[Tensor | None] = [None] * NUM_BUFFERS
    slot, end, packed = 0, 0, list[Packed]()
    for name, tensor in named:
        start, size, buffer = -(-end // ALIGNMENT) * ALIGNMENT, tensor.nbytes, buffers[slot]
        if packed and buffer is not None and start + size > len(buffer):
            yield slot, buffer[:end], packed
            slot, start, packed = (slot + 1) % NUM_BUFFERS, 0, []
            buffer = buffers[slot]
        if buffer is None or size > len(buffer):
            buffer = buffers[slot] = new_buffer(slot, max(BUFFER_BYTES, size))
        end = start + size
        buffer[start:end].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(Packed(name, dtype, tuple(tensor.shape), start, size))
    if packed and buffer is not None:
        yield slot, buffer[:end], packed


def unpacked(buffer: Tensor, packed: Iterable[Packed]) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of each tensor. They are copies because vLLM keeps what it was given until a
    layer is complete, when the buffer holds other tensors."""
    for name, dtype, shape, start, num_bytes in packed:
        flat = buffer[start : start + num_bytes]
        yield name, flat.view(getattr(torch, dtype)).view(shape).clone()
