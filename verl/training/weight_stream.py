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

from verl.training.weight_packing import NUM_BUFFERS, PATIENCE_S, Packed, Packer, Sent, unpacked

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket."""
DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the card by its number here, which may be another one there."""


def card(device: torch.device) -> str:
    """What rank and engine on one device both call it; all of a machine's CPU is one."""
    if device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(device).uuid)


def send(
    named: Iterable[tuple[str, Tensor]], stream: str, device: torch.device, num_receivers: int,
    dtype: torch.dtype,
) -> Sent:  # fmt: skip
    """Give tensors, as `dtype`, to the workers on this device that call `received(stream)`.

    The iteration runs to its end in any case. A worker that does not come, or ends before, is left
    out; who started it notices. Its seconds are those in which this rank packed and waited.
    """
    with _accepted(_address(stream, device), num_receivers) as links:
        sender = _Sender(links, device)
        sender.pack(named, dtype)
    return sender.sent


def received(stream: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and copy of each tensor that the rank on this device sends.

    Raises ConnectionError where the rank does not come, or ends.
    """
    with contextlib.closing(_connected(_address(stream, device))) as link:
        buffers: dict[int, Tensor] = {}
        try:
            while (message := link.recv()) is not None:
                slot, num_bytes, packed = message
                if num_bytes:
                    buffers[slot] = _shown(link, num_bytes, device)
                copies = unpacked(buffers[slot], packed)
                _synchronize(device)
                link.send(slot)
                yield from copies
            buffers.clear()
            link.send(None)
        except (EOFError, OSError):
            raise ConnectionError("the training rank ended while it sent weights") from None


class _Sender(Packer):
    """To those at the other ends of links."""

    def __init__(self, links: list[Connection], device: torch.device) -> None:
        super().__init__(device)
        self.links = list(links)
        self._shared: list[_Buffer | None] = [None] * NUM_BUFFERS
        self._is_unread = [False] * NUM_BUFFERS
        """Of each slot: what was sent is not acknowledged yet."""

    @property
    def has_receivers(self) -> bool:
        """One whose other end is gone is left out."""
        return bool(self.links)

    def new_buffer(self, slot: int, num_bytes: int) -> Tensor:
        """Memory that the other ends are shown with the next message."""
        self._shared[slot] = buffer = _Buffer.of(num_bytes, self.device)
        return buffer.bytes

    def send(self, slot: int, buffer: Tensor, packed: list[Packed]) -> None:
        """Say what lies in the slot."""
        shared = self._shared[slot]
        assert shared is not None
        _synchronize(self.device)
        message = slot, 0 if shared.is_known else len(buffer), packed

        def tell(link: Connection) -> None:
            link.send(message)
            if not shared.is_known:
                shared.show(link)

        self._each(tell)
        shared.is_known = True
        self._is_unread[slot] = True

    def wait(self, slot: int) -> None:
        """For what every other end answers when it has its copies."""
        if self._is_unread[slot]:
            self._each(lambda link: link.recv())
            self._is_unread[slot] = False

    def end(self) -> None:
        """Wait until every buffer is let go too."""
        self._each(lambda link: link.send(None))
        self._each(lambda link: link.recv())
        self._shared = [None] * NUM_BUFFERS
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

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
