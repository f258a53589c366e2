"""Weight transfer from training ranks to engines on the same device, through shared memory.

On a GPU a buffer is the rank's memory, which the engine's worker opens by CUDA IPC; on a CPU it is
anonymous memory (memfd), which cannot outlive the processes. Both sides connect through a Unix
socket of this machine, whose address contains the device.

vLLM's own transfer engines (0.32) need CUDA on both sides and send every handle through the driver;
here rank and worker communicate directly, and a machine without a GPU runs the same code.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, explain
from verl.ext.transports import stream as streams
from verl.ext.transports.stream import (
    NUM_BUFFERS,
    NamedTensors,
    Stream,
    StreamSender,
    TransferStats,
    cast_tensors,
    pack,
    unpack,
)
from verl.training.devices import device_id
from verl.weights.files import OPTION, Ranks

ACK_TIMEOUT_S = 300.0
"""Seconds to wait for a worker to copy a buffer: a worker that hangs must not block the ranks."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group id of a socket's peer."""
DEVICE_ARGUMENT = 6
"""Index of the device number, which may differ by process, in `rebuild_cuda_tensor`'s arguments."""


class IpcSender(StreamSender):
    """The part on a rank, which serves the workers on its own device."""

    def device(self) -> str:
        """Return the name that ranks and engines' workers use for this rank's device."""
        return device_id(self.rank.device)

    def transfer(
        self, named: NamedTensors, address: str, num_receivers: int, dtype: torch.dtype
    ) -> TransferStats:
        return send(named, address, self.rank.device, num_receivers, dtype)


class IpcReceiver:
    """The part in an engine's worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def receive(self, address: str) -> Iterator[tuple[str, Tensor]]:
        """Receive from the rank on this worker's device; see `receive`."""
        return receive(address, self._device)


class Ipc(Stream):
    """Each worker of an engine receives from the first rank on its own device."""

    sender = IpcSender
    receiver = IpcReceiver
    shares_memory = True

    @classmethod
    def problems(cls, config: Config, engine: type[RolloutEngine]) -> Iterator[ConfigError]:
        """Yield also that engines do not wait on the ranks' own devices."""
        yield from super().problems(config, engine)
        rollout, plan = config.actor_rollout_ref.rollout, config.placement
        obstacles = {"max_staleness": rollout.max_staleness > 0,
                     "trainer.rollout_gpus": plan.is_split, "url": bool(plan.servers)}  # fmt: skip
        found = [name for name, is_set in obstacles.items() if is_set]
        if found:
            expected = (
                f"files with {', '.join(found)}: ipc only reaches engines that wait on the ranks' "
                "own devices"
            )
            fix = "files" if plan.is_colocated or plan.servers else "nccl"
            yield ConfigError(explain(OPTION, "ipc", expected, f"{OPTION}={fix}"))

    def open(self, ranks: Ranks, devices: Sequence[str]) -> tuple[str, Sequence[int]]:
        """Have the first rank on a device serve all workers there. Raises ConfigError."""
        left = Counter(devices)
        receivers = [left.pop(device, 0) for device in ranks.group.call("sender.device")]
        if left:
            got = f"an engine on {', '.join(left)}, which has no rank"
            expected = "a rank on each engine's device"
            raise ConfigError(explain(OPTION, got, expected, f"{OPTION}=files"))
        return secrets.token_hex(8), receivers


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
    return f"\0verl-weights-{stream}-{device_id(device)}"


def _accept_workers(address: str, number: int) -> list[Connection]:
    """Accept `number` connections from processes of this user, or those that come in time."""
    connections: list[Connection] = []
    if not number:
        return connections
    with contextlib.suppress(TimeoutError), socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(number)
        server.settimeout(streams.CONNECT_TIMEOUT_S)
        while len(connections) < number:
            peer, _ = server.accept()
            if _is_same_user(peer):
                connections.append(Connection(peer.detach()))
            else:
                peer.close()
    return connections


def _connect_to_rank(address: str) -> Connection:
    """Connect to the rank that listens at `address`. Raises ConnectionError."""
    end = time.monotonic() + streams.CONNECT_TIMEOUT_S
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
    raise ConnectionError(
        f"no training rank sends weights here within {streams.CONNECT_TIMEOUT_S:.0f} s"
    )


def _is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer is a process of this user; its messages are unpickled."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(credentials)[1] == os.getuid())
