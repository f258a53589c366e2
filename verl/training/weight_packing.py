"""Packing weights, one tensor behind the other, into buffers that engines copy them out of."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BUFFER_BYTES = 256 << 20
"""Of each of the two buffers, unless one tensor is larger."""
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Bytes at which a tensor begins, for whatever dtype it has."""
PATIENCE_S = 60.0
"""Within which both sides meet."""


@dataclass(frozen=True)
class Packed:
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


class Packer(ABC):
    """Fills buffers in turn; one is not touched before every receiver has what it held."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.sent = device, Sent()
        self._slot, self._end = 0, 0
        self._packed: list[Packed] = []
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS

    @property
    @abstractmethod
    def has_receivers(self) -> bool:
        """Whether anyone still waits for weights."""

    @abstractmethod
    def new_buffer(self, slot: int, num_bytes: int) -> Tensor:
        """Bytes that may be sent, (num_bytes,); whatever the slot had before is let go."""

    @abstractmethod
    def send(self, slot: int, buffer: Tensor, packed: list[Packed]) -> None:
        """Begin to send what is packed in the buffer of a slot."""

    @abstractmethod
    def wait(self, slot: int) -> None:
        """Wait until every receiver has what was sent of a slot, if anything was."""

    @abstractmethod
    def end(self) -> None:
        """Tell receivers that this was all."""

    def encoded(self, name: str, tensor: Tensor) -> Tensor | None:
        """What is sent in place of a tensor; None for nothing."""
        return tensor

    def pack(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Send all these tensors, as `dtype`.

        The iteration runs to its end in any case: ranks gather tensors together.
        """
        for name, tensor in named:
            if self.has_receivers:
                with self._timed():
                    encoded = self.encoded(name, tensor.to(self.device, dtype))
                    if encoded is not None:
                        self._add(name, encoded)
        if self.has_receivers:
            with self._timed():
                self._finish()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.sent.seconds += time.perf_counter() - begin

    def _finish(self) -> None:
        if self._packed:
            self._flush()
        for slot in range(NUM_BUFFERS):
            self.wait(slot)
        self._buffers = [None] * NUM_BUFFERS
        self.end()

    def _add(self, name: str, tensor: Tensor) -> None:
        """Pack one more; what is packed goes before it where both find no room."""
        start, size = -(-self._end // ALIGNMENT) * ALIGNMENT, tensor.nbytes
        buffer = self._buffers[self._slot]
        if self._packed and (buffer is None or start + size > len(buffer)):
            self._flush()
            start, buffer = 0, self._buffers[self._slot]
        if buffer is None or size > len(buffer):
            buffer = self.new_buffer(self._slot, max(BUFFER_BYTES, size))
            self._buffers[self._slot] = buffer
        buffer[start : start + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._packed.append(Packed(name, dtype, tuple(tensor.shape), start, size))
        self._end = start + size

    def _flush(self) -> None:
        """Send what is packed; the next buffer is then free."""
        buffer = self._buffers[self._slot]
        assert buffer is not None
        self.send(self._slot, buffer, self._packed)
        self.sent.num_bytes += self._end
        self._slot, self._end, self._packed = (self._slot + 1) % NUM_BUFFERS, 0, []
        self.wait(self._slot)


def unpacked(buffer: Tensor, packed: Iterable[Packed]) -> list[tuple[str, Tensor]]:
    """Name and copy of each tensor.

    They are copies because vLLM keeps what it was given until a layer is complete, when the
    buffer holds other tensors.
    """
    found = []
    for one in packed:
        flat = buffer[one.start : one.start + one.num_bytes]
        tensor = flat.view(getattr(torch, one.dtype)).view(one.shape).clone()
        found.append((one.name, tensor))
    return found
