"""New weights from training ranks to engines on the same device, through memory that both see.

A rank packs whole tensors, in the engine's dtype, into one of two buffers while the engine's worker
copies them out of the other. On a GPU a buffer is the rank's memory, which CUDA IPC shows to the
worker; on a CPU it is memory without a name (memfd), so that nothing outlives the processes. Both
meet at a Unix socket of this machine, which is named after the device.

vLLM's own transfer engines (0.32) need CUDA on both sides and send every handle through the driver;
here neighbours talk to each other, and a machine without a card runs the same code.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

BUFFER_BYTES = 256 << 20
"""Of each of the two buffers, unless one tensor is larger."""
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Bytes at which a tensor begins, for whatever dtype it has."""
PATIENCE_S = 60.0
"""Within which both sides meet."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket."""
DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the card by its number here, which may be another one there."""


@dataclass(frozen=True)
class Packed:
    """Where one tensor lies in a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def card(device: torch.device) -> str:
    """What rank and engine on one device both call it; all of a machine's CPU is one."""
    if device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(device).uuid)


def send(
    named: Iterable[tuple[str, Tensor]], stream: str, device: torch.device, num_receivers: int,
    dtype: torch.dtype,
) -> float:  # fmt: skip
    """Give tensors, as `dtype`, to the workers on this device that call `received(stream)`.

    The iteration runs to its end in any case: ranks gather tensors together. A worker that does not
    come, or ends before, is left out; who started it notices. Returns the seconds in which this
    rank packed and waited, without those in which tensors came.
    """
    with _accepted(_address(stream, device), num_receivers) as links:
        sender = _Sender(links, device)
        for name, tensor in named:
            if sender.links:
                sender.add(name, tensor.to(device, dtype))
        sender.finish()
    return sender.seconds


def received(stream: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of each tensor that the rank on this device sends.

    They are copies because vLLM keeps what it was given until a layer is complete, when the
    buffer holds other tensors. Raises ConnectionError where the rank does not come, or ends.
    """
    with contextlib.closing(_connected(_address(stream, device))) as link:
        buffers: dict[int, Tensor] = {}
        try:
            while (message := link.recv()) is not None:
                slot, num_bytes, packed = message
                if num_bytes:
                    buffers[slot] = _shown(link, num_bytes, device)
                copies = [(one.name, _unpacked(buffers[slot], one)) for one in packed]
                _synchronize(device)
                link.send(slot)
                yield from copies
            buffers.clear()
            link.send(None)
        except (EOFError, OSError):
            raise ConnectionError("the training rank ended while it sent weights") from None


class _Sender:
    """Fills buffers in turn; one is not touched before every receiver has copied what it held."""

    def __init__(self, links: list[Connection], device: torch.device) -> None:
        self.links, self.device, self.seconds = list(links), device, 0.0
        self._buffers: list[_Buffer | None] = [None] * NUM_BUFFERS
        self._slot, self._end = 0, 0
        self._packed: list[Packed] = []
        self._unread = [0] * NUM_BUFFERS
        """Messages for each slot that nobody has acknowledged yet, be it 0 or 1."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Pack one more; what is packed goes before it where both find no room."""
        begin = time.perf_counter()
        start, size = -(-self._end // ALIGNMENT) * ALIGNMENT, tensor.nbytes
        buffer = self._buffers[self._slot]
        if self._packed and (buffer is None or start + size > len(buffer.bytes)):
            self._flush()
            start, buffer = 0, self._buffers[self._slot]
        if buffer is None or size > len(buffer.bytes):
            buffer = self._buffers[self._slot] = _Buffer.of(max(BUFFER_BYTES, size), self.device)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        buffer.bytes[start : start + size].copy_(flat)
        self._packed.append(Packed(name, tensor.dtype, tuple(tensor.shape), start, size))
        self._end = start + size
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Send the rest, and wait until all is copied and every buffer let go."""
        if not self.links:
            return
        begin = time.perf_counter()
        if self._packed:
            self._flush()
        for slot in range(NUM_BUFFERS):
            self._wait(slot)
        self._each(lambda link: link.send(None))
        self._each(lambda link: link.recv())
        self._buffers.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        self.seconds += time.perf_counter() - begin

    def _flush(self) -> None:
        """Send what is packed; the next buffer is then free."""
        buffer = self._buffers[self._slot]
        assert buffer is not None
        _synchronize(self.device)
        message = self._slot, 0 if buffer.is_known else len(buffer.bytes), self._packed

        def tell(link: Connection) -> None:
            link.send(message)
            if not buffer.is_known:
                buffer.show(link)

        self._each(tell)
        buffer.is_known = True
        self._unread[self._slot] = 1
        self._slot, self._end, self._packed = (self._slot + 1) % NUM_BUFFERS, 0, []
        self._wait(self._slot)

    def _wait(self, slot: int) -> None:
        if self._unread[slot]:
            self._each(lambda link: link.recv())
            self._unread[slot] = 0

    def _each(self, call: Callable[[Connection], object]) -> None:
        """Call it with each link; one whose other end is gone is left out from then on."""
        for link in list(self.links):
            try:
                call(link)
            except (EOFError, OSError):
                self.links.remove(link)


@dataclass
class _Buffer:
    """Bytes that another process can see."""

    bytes: Tensor
    descriptor: int | None
    """Of memory without a name; None on a GPU."""
    is_known: bool = False
    """To those it is sent to."""

    @classmethod
    def of(cls, num_bytes: int, device: torch.device) -> _Buffer:
        """A new one."""
        if device.type == "cuda":
            return cls(torch.empty(num_bytes, dtype=torch.uint8, device=device), None)
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, num_bytes)
        return cls(_mapped(descriptor, num_bytes), descriptor)

    def show(self, link: Connection) -> None:
        """Let the other end of `link` see it."""
        if self.descriptor is None:
            link.send(reduce_tensor(self.bytes)[1])
        else:
            reduction.send_handle(link, self.descriptor, 0)

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def _shown(link: Connection, num_bytes: int, device: torch.device) -> Tensor:
    """The buffer that `_Buffer.show` lets this process see."""
    if device.type == "cuda":
        arguments = list(link.recv())
        arguments[DEVICE_ARGUMENT] = device.index
        shown: Tensor = rebuild_cuda_tensor(*arguments)
        return shown
    descriptor = reduction.recv_handle(link)
    try:
        return _mapped(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    """The tensor keeps the memory, which needs no descriptor any more."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _unpacked(buffer: Tensor, one: Packed) -> Tensor:
    flat = buffer[one.start : one.start + one.num_bytes]
    return flat.view(one.dtype).view(one.shape).clone()


def _synchronize(device: torch.device) -> None:
    """Wait for copies that are on their way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address(stream: str, device: torch.device) -> str:
    """Of a socket without a file: it goes with its processes."""
    return f"\0verl-weights-{stream}-{card(device)}"


@contextlib.contextmanager
def _accepted(address: str, number: int) -> Iterator[list[Connection]]:
    """Connections from so many processes of this user, or from those that come in time."""
    links: list[Connection] = []
    with socket.socket(socket.AF_UNIX) as server:
        if number:
            server.bind(address)
            server.listen(number)
            server.settimeout(PATIENCE_S)
        try:
            while len(links) < number:
                other, _ = server.accept()
                if _is_ours(other):
                    links.append(Connection(other.detach()))
                else:
                    other.close()
        except TimeoutError:
            pass
        try:
            yield links
        finally:
            for link in links:
                link.close()


def _connected(address: str) -> Connection:
    """Raises ConnectionError."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        rank = socket.socket(socket.AF_UNIX)
        try:
            rank.connect(address)
        except ConnectionRefusedError:  # it does not listen yet
            rank.close()
            time.sleep(0.01)
            continue
        if not _is_ours(rank):
            rank.close()
            raise ConnectionError("another user's process answers in place of the training rank")
        return Connection(rank.detach())
    raise ConnectionError(f"no training rank sends weights here within {PATIENCE_S:.0f} s")


def _is_ours(other: socket.socket) -> bool:
    """What it sends is unpickled: it must be a process of this user."""
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())
