"""Weight transfer from training ranks to engines on the same device, through shared memory.

A rank packs whole tensors, in the engine's dtype, into one of two buffers while the engine's worker
copies them out of the other. On a GPU a buffer is the rank's memory, which the worker opens by CUDA
IPC; on a CPU it is anonymous memory (memfd), which cannot outlive the processes. Both sides connect
through a Unix socket of this machine, whose address contains the device.

vLLM's own transfer engines (0.32) need CUDA on both sides and send every handle through the driver;
here rank and worker communicate directly, and a machine without a GPU runs the same code.
"""

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
"""Size of each of the two buffers, unless a single tensor is larger."""
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Tensors start at multiples of this many bytes, which suits every dtype."""
CONNECT_TIMEOUT_S = 60.0
"""Seconds to wait for the other side to connect."""
ACK_TIMEOUT_S = 300.0
"""Seconds to wait for a worker to copy a buffer: a worker that hangs must not block the ranks."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group id of a socket's peer."""
DEVICE_ARGUMENT = 6
"""Index of the device number, which may differ by process, in `rebuild_cuda_tensor`'s arguments."""
NamedTensors = Iterable[tuple[str, Tensor]]


class PackedTensor(NamedTuple):
    """Position of a tensor in a buffer, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass
class TransferStats:
    """Cost of one weight transfer."""

    seconds: float = 0.0
    """Time to pack and send the tensors, without the time to gather them from the ranks."""
    num_bytes: int = 0


def cast_tensors(
    named: NamedTensors, device: torch.device, dtype: torch.dtype, stats: TransferStats
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor on `device` as `dtype`, and subtract the time of `named` from `stats`."""
    begin = time.perf_counter()
    for name, tensor in named:
        stats.seconds -= time.perf_counter() - begin
        yield name, tensor.to(device, dtype)
        del tensor  # free it before the next one is gathered
        begin = time.perf_counter()
    stats.seconds -= time.perf_counter() - begin


def pack(
    named: NamedTensors, new_buffer: Callable[[int, int], Tensor]
) -> Iterator[tuple[int, Tensor, list[PackedTensor]]]:
    """Fill the buffers in turn; yield the buffer's index, its filled bytes and their tensors.

    `new_buffer(index, num_bytes)` allocates a buffer. A buffer is filled again as soon as the
    other one was yielded: by then every receiver must have copied its content.
    """
    buffers: list[Tensor | None] = [None] * NUM_BUFFERS
    index, end, packed = 0, 0, list[PackedTensor]()
    for name, tensor in named:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        size = tensor.nbytes
        buffer = buffers[index]
        if packed and buffer is not None and start + size > len(buffer):
            yield index, buffer[:end], packed
            index, start, packed = (index + 1) % NUM_BUFFERS, 0, []
            buffer = buffers[index]
        if buffer is None or size > len(buffer):
            buffer = buffers[index] = new_buffer(index, max(BUFFER_BYTES, size))
        end = start + size
        buffer[start:end].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        packed.append(PackedTensor(name, dtype, tuple(tensor.shape), start, size))
        del tensor  # free it before the next one is gathered
    if packed and buffer is not None:
        yield index, buffer[:end], packed


def unpack(buffer: Tensor, packed: Iterable[PackedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a copy of each tensor in a buffer."""
    # Copies, since vLLM keeps tensors until a layer is complete: the buffer has other content then.
    for name, dtype, shape, start, num_bytes in packed:
        flat = buffer[start : start + num_bytes]
        yield name, flat.view(getattr(torch, dtype)).view(shape).clone()


def device_key(device: torch.device) -> str:
    """Return a name of the device that rank and engine agree on: the GPU's UUID, or the host's."""
    if device.type != "cuda":
        return socket.gethostname()
    return str(torch.cuda.get_device_properties(device).uuid)


def send(
    named: NamedTensors, stream: str, device: torch.device, num_receivers: int, dtype: torch.dtype
) -> TransferStats:
    """Send tensors, as `dtype`, to the workers on this device that call `receive(stream)`.

    `named` is always iterated to its end, because the ranks gather the tensors together. A worker
    that does not connect, or is lost, is skipped; the process that started it notices.
    """
    connections = _accept_workers(_address(stream, device), num_receivers)
    stats = TransferStats()
    try:
        if connections:
            begin = time.perf_counter()
            _send(cast_tensors(named, device, dtype, stats), connections, device, stats)
            stats.seconds += time.perf_counter() - begin
        else:
            for _ in named:
                pass
    finally:
        for connection in connections:
            connection.close()
    if device.type == "cuda":
        torch.cuda.ipc_collect()
    return stats


def _send(
    named: NamedTensors, connections: list[Connection], device: torch.device, stats: TransferStats
) -> None:
    workers = list(connections)
    unacknowledged = set[int]()

    def for_each_worker(call: Callable[..., object], *args: Any) -> None:
        """Call `call(connection, *args)` for each worker, and drop the workers that are gone."""
        for connection in list(workers):
            try:
                call(connection, *args)
            except (EOFError, OSError):
                workers.remove(connection)

    def wait_for_copies(index: int) -> None:
        """Wait until every worker has copied the buffer's content."""
        if index in unacknowledged:
            for_each_worker(_receive_ack)
            unacknowledged.remove(index)

    def new_buffer(index: int, num_bytes: int) -> Tensor:
        """Allocate a buffer and share it with the workers."""
        if device.type == "cuda":
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for_each_worker(lambda worker: worker.send((index, reduce_tensor(buffer)[1], [])))
            return buffer
        descriptor = os.memfd_create("weights")
        try:
            os.ftruncate(descriptor, num_bytes)
            for_each_worker(Connection.send, (index, num_bytes, []))
            for_each_worker(reduction.send_handle, descriptor, 0)
            return _map_memory(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    for index, filled, packed in pack(named, new_buffer):
        _synchronize(device)
        for_each_worker(Connection.send, (index, None, packed))
        unacknowledged.add(index)
        stats.num_bytes += len(filled)
        wait_for_copies((index + 1) % NUM_BUFFERS)
        if not workers:
            break
    for _ in named:  # every worker is lost: gather the remaining tensors with the other ranks
        pass
    for index in range(NUM_BUFFERS):
        wait_for_copies(index)
    for_each_worker(Connection.send, None)
    for_each_worker(_receive_ack)  # the workers have released every buffer


def _receive_ack(connection: Connection) -> None:
    """Receive a worker's acknowledgement. Raises TimeoutError, an OSError, if there is none."""
    if not connection.poll(ACK_TIMEOUT_S):
        raise TimeoutError
    connection.recv()


def receive(stream: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield name and copy of each tensor that this device's rank sends. Raises ConnectionError."""
    with contextlib.closing(_connect_to_rank(_address(stream, device))) as connection:
        buffers: dict[int, Tensor] = {}
        try:
            while (message := connection.recv()) is not None:
                index, memory, packed = message
                if memory is not None:
                    buffers[index] = _open_buffer(connection, memory, device)
                    continue
                copies = list(unpack(buffers[index], packed))
                _synchronize(device)
                connection.send(index)
                yield from copies
            buffers.clear()
            connection.send(None)
        except (EOFError, OSError):
            raise ConnectionError("the training rank ended while it sent weights") from None


def _open_buffer(connection: Connection, memory: Any, device: torch.device) -> Tensor:
    """Open a buffer of the rank: `memory` is a CUDA IPC handle, or on a CPU the buffer's size."""
    if device.type == "cuda":
        arguments = list(memory)
        arguments[DEVICE_ARGUMENT] = device.index
        buffer: Tensor = rebuild_cuda_tensor(*arguments)
        return buffer
    descriptor = reduction.recv_handle(connection)
    try:
        return _map_memory(descriptor, memory)
    finally:
        os.close(descriptor)


def _map_memory(descriptor: int, num_bytes: int) -> Tensor:
    """Map the memory as a tensor, which keeps it alive after the descriptor is closed."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address(stream: str, device: torch.device) -> str:
    """Return an abstract socket address: it has no file and disappears with its processes."""
    return f"\0verl-weights-{stream}-{device_key(device)}"


def _accept_workers(address: str, number: int) -> list[Connection]:
    """Accept `number` connections from processes of this user, or those that come in time."""
    connections: list[Connection] = []
    if not number:
        return connections
    with contextlib.suppress(TimeoutError), socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(number)
        server.settimeout(CONNECT_TIMEOUT_S)
        while len(connections) < number:
            peer, _ = server.accept()
            if _is_same_user(peer):
                connections.append(Connection(peer.detach()))
            else:
                peer.close()
    return connections


def _connect_to_rank(address: str) -> Connection:
    """Connect to the rank that listens at `address`. Raises ConnectionError."""
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as rank:
            try:
                rank.connect(address)
            except ConnectionRefusedError:  # it does not listen yet
                time.sleep(0.01)
                continue
            if not _is_same_user(rank):
                raise ConnectionError("another user's process answers for the training rank")
            return Connection(rank.detach())
    raise ConnectionError(f"no training rank sends weights here within {CONNECT_TIMEOUT_S:.0f} s")


def _is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer is a process of this user; its messages are unpickled."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.getuid())
