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
from typing import Any, NamedTuple

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
ANSWER_S = 300.0
"""Within which a worker has taken a buffer; one that hangs must not keep the ranks."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket."""
DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the card by its number here, which may be another one there."""
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
        del tensor  # before the next one is gathered
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
        del tensor
    if packed and buffer is not None:
        yield slot, buffer[:end], packed


def unpacked(buffer: Tensor, packed: Iterable[Packed]) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of each tensor. They are copies because vLLM keeps what it was given until a
    layer is complete, when the buffer holds other tensors."""
    for name, dtype, shape, start, num_bytes in packed:
        flat = buffer[start : start + num_bytes]
        yield name, flat.view(getattr(torch, dtype)).view(shape).clone()


def card(device: torch.device) -> str:
    """What rank and engine on one device both call it; all of a machine's CPU is one."""
    if device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(device).uuid)


def send(
    named: Named, stream: str, device: torch.device, num_receivers: int, dtype: torch.dtype
) -> Sent:
    """Give tensors, as `dtype`, to the workers on this device that call `received(stream)`.

    The iteration runs to its end in any case: ranks gather tensors together. A worker that does not
    come, or ends before, is left out; who started it notices.
    """
    links, sent = _accepted(_address(stream, device), num_receivers), Sent()
    try:
        if links:
            begin = time.perf_counter()
            _send(coming(named, device, dtype, sent), links, device, sent)
            sent.seconds += time.perf_counter() - begin
        else:
            for _ in named:
                pass
    finally:
        for link in links:
            link.close()
    if device.type == "cuda":
        torch.cuda.ipc_collect()
    return sent


def _send(named: Named, given: list[Connection], device: torch.device, sent: Sent) -> None:
    links, unread = list(given), set[int]()

    def each(call: Callable[..., object], *args: Any) -> None:
        """Call it with each link; one whose other end is gone is left out from then on."""
        for link in list(links):
            try:
                call(link, *args)
            except (EOFError, OSError):
                links.remove(link)

    def wait(slot: int) -> None:
        """For what every other end answers when it has its copies."""
        if slot in unread:
            each(_heard)
            unread.remove(slot)

    def new_buffer(slot: int, num_bytes: int) -> Tensor:
        """Memory that the other ends are shown."""
        if device.type == "cuda":
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            each(lambda link: link.send((slot, reduce_tensor(buffer)[1], [])))
            return buffer
        descriptor = os.memfd_create("weights")
        try:
            os.ftruncate(descriptor, num_bytes)
            each(Connection.send, (slot, num_bytes, []))
            each(reduction.send_handle, descriptor, 0)
            return _mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    for slot, filled, packed in pack(named, new_buffer):
        _synchronize(device)
        each(Connection.send, (slot, None, packed))
        unread.add(slot)
        sent.num_bytes += len(filled)
        wait((slot + 1) % NUM_BUFFERS)
        if not links:
            break
    for _ in named:  # nobody is left who takes them
        pass
    for slot in range(NUM_BUFFERS):
        wait(slot)
    each(Connection.send, None)
    each(_heard)  # the other ends have let go of every buffer


def _heard(link: Connection) -> None:
    """Take a worker's answer. Raises TimeoutError, an OSError, for one that does not come."""
    if not link.poll(ANSWER_S):
        raise TimeoutError
    link.recv()


def received(stream: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of each tensor that the rank on this device sends. Raises ConnectionError where
    the rank does not come, or ends."""
    with contextlib.closing(_connected(_address(stream, device))) as link:
        buffers: dict[int, Tensor] = {}
        try:
            while (message := link.recv()) is not None:
                slot, memory, packed = message
                if memory is not None:
                    buffers[slot] = _shown(link, memory, device)
                    continue
                copies = list(unpacked(buffers[slot], packed))
                _synchronize(device)
                link.send(slot)
                yield from copies
            buffers.clear()
            link.send(None)
        except (EOFError, OSError):
            raise ConnectionError("the training rank ended while it sent weights") from None


def _shown(link: Connection, memory: Any, device: torch.device) -> Tensor:
    """The buffer that the rank shows this process: so many bytes, or an address of its device."""
    if device.type == "cuda":
        arguments = list(memory)
        arguments[DEVICE_ARGUMENT] = device.index
        shown: Tensor = rebuild_cuda_tensor(*arguments)
        return shown
    descriptor = reduction.recv_handle(link)
    try:
        return _mapped(descriptor, memory)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    """The tensor keeps the memory, which needs no descriptor any more."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _synchronize(device: torch.device) -> None:
    """Wait for copies that are on their way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address(stream: str, device: torch.device) -> str:
    """Of a socket without a file: it goes with its processes."""
    return f"\0verl-weights-{stream}-{card(device)}"


def _accepted(address: str, number: int) -> list[Connection]:
    """Connections from so many processes of this user, or from those that come in time."""
    links: list[Connection] = []
    if not number:
        return links
    with contextlib.suppress(TimeoutError), socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(number)
        server.settimeout(PATIENCE_S)
        while len(links) < number:
            other, _ = server.accept()
            if _is_ours(other):
                links.append(Connection(other.detach()))
            else:
                other.close()
    return links


def _connected(address: str) -> Connection:
    """Raises ConnectionError."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as rank:
            try:
                rank.connect(address)
            except ConnectionRefusedError:  # it does not listen yet
                time.sleep(0.01)
                continue
            if not _is_ours(rank):
                raise ConnectionError(
                    "another user's process answers in place of the training rank"
                )
            return Connection(rank.detach())
    raise ConnectionError(f"no training rank sends weights here within {PATIENCE_S:.0f} s")


def _is_ours(other: socket.socket) -> bool:
    """What it sends is unpickled: it must be a process of this user."""
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())
