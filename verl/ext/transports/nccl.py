"""Weight transfer from the first training rank to engines on other devices, by NCCL (CPU: gloo).

The rank and the workers of all engines form one process group, separate from the ranks' and the
engines' own groups. The rank fills one of two buffers while the other one is broadcast. The content
of each buffer is announced in the group's store, as JSON. Transfers are numbered from 1.

vLLM's own transfer engine (0.32) needs NCCL and sends every shape through the driver; here a
machine without a GPU runs the same code.
"""

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config import Config
from verl.config.rules import ROLLOUT
from verl.engine import RolloutEngine
from verl.errors import ConfigError, explain
from verl.ext.transports import stream as streams
from verl.ext.transports.stream import (
    NUM_BUFFERS,
    NamedTensors,
    PackedTensor,
    Stream,
    StreamSender,
    TransferStats,
)
from verl.weights.files import OPTION, Engines, Ranks

SENDER = 0
RECEIVERS_LOST = "the engines did not receive the new weights"
SENDER_LOST = "the training rank did not send its weights"
POLL_S = 0.0005
"""Seconds between two looks at a broadcast that is running."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that says what torch does if a member of an NCCL group is lost; by default it ends the
process."""

logger = logging.getLogger(__name__)
_TcpStore = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it, mypy does not see how


GroupFactory = Callable[[Any, int, int, torch.device, timedelta], Any]
"""Makes a process group from its store, this member's rank, its size, a device and a timeout."""


def make_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Create this member's process group: NCCL on a GPU, gloo on a CPU.

    `finish` watches over every broadcast. So torch's own watchdog, which would end the process, and
    with it a training rank whose engine was lost, only reports errors.
    """
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # it has no other setter
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"  # read when the group is created
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[ERROR_HANDLING]
        if before is not None:
            os.environ[ERROR_HANDLING] = before


def finish(work: Any, timeout_s: float) -> None:
    """Wait until a collective is complete on the device. Raises RuntimeError.

    With NCCL, `wait` only lets the stream wait: it returns at once, also if a member is lost, which
    leaves the collective running for ever.
    """
    end = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"a broadcast did not end within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    if (error := work.exception()) is not None:
        raise RuntimeError(f"a broadcast failed: {error}")
    work.wait()  # raises gloo's errors; with NCCL, work on this stream starts after it


class _Endpoint:
    """What both ends share: the store, and the process group once everybody has joined."""

    _rank = SENDER
    _size = 0
    _number = 0
    """Number of the current transfer."""
    _group: Any = None

    def __init__(self, host: str, port: int, device: torch.device, factory: GroupFactory) -> None:
        """Connect to the store at `port`, or create it if `port` is 0."""
        self._device, self._factory = device, factory
        self._timeout = timedelta(seconds=streams.CONNECT_TIMEOUT_S)
        self._store = _TcpStore(
            host, port, is_master=port == 0, wait_for_workers=False, timeout=self._timeout
        )

    def _begin_transfer(self) -> None:
        """Wait until all members are ready for the next transfer; first create the group."""
        self._number += 1
        if self._store.add(f"{self._number}/here", 1) == self._size:
            self._store.set(f"{self._number}/begin", "")
        self._store.wait([f"{self._number}/begin"])
        if self._group is not None:
            return
        self._group = self._factory(
            self._store, self._rank, self._size, self._device, self._timeout
        )

    def _finish(self, work: Any) -> None:
        """Wait for a broadcast; if it does not end in time, leave the group. Raises RuntimeError.

        A group that was left cannot be used again: the engines restart and join another one.
        """
        try:
            finish(work, streams.CONNECT_TIMEOUT_S)
        except RuntimeError:
            self._group.abort()  # ends a kernel that waits for the lost member
            raise

    def _new_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class WeightBroadcast(_Endpoint):
    """The sending end, on the first training rank."""

    def __init__(
        self, host: str, num_receivers: int, device: torch.device,
        factory: GroupFactory = make_group,
    ) -> None:  # fmt: skip
        """Listen at this machine's address `host` for `num_receivers` workers."""
        super().__init__(host, 0, device, factory)
        self._size = num_receivers + 1
        self._announced: list[str] = []  # keys of the current transfer's parts in the store
        self.address = f"{host}:{self._store.port}:{self._size}"
        """Address of the store, and the group's size, by which workers join."""

    def send(self, named: NamedTensors, dtype: torch.dtype) -> TransferStats:
        """Send tensors, as `dtype`, to all workers, each of which iterates `receive`.

        `named` is always iterated to its end, because the ranks gather the tensors together. If a
        worker does not join or is lost, no worker gets the weights; the process that started the
        worker notices. The seconds returned include waiting for the workers.
        """
        begin, stats = time.perf_counter(), TransferStats()
        tensors = streams.cast_tensors(named, self._device, dtype, stats)
        try:
            self._send(tensors, stats)
        except ConnectionError as error:
            logger.warning("%s", error)
            for _ in tensors:
                pass
        stats.seconds += time.perf_counter() - begin
        return stats

    def _send(self, named: NamedTensors, stats: TransferStats) -> None:
        with _connection_errors(RECEIVERS_LOST):
            self._begin_transfer()
            while self._announced:  # every worker is done with the last transfer
                self._store.delete_key(self._announced.pop())
        broadcasts: list[Any] = [None] * NUM_BUFFERS
        for index, filled, packed in streams.pack(named, lambda _, n: self._new_buffer(n)):
            stats.num_bytes += len(filled)
            with _connection_errors(RECEIVERS_LOST):
                self._announce(packed)
                broadcasts[index] = self._group.broadcast(filled, SENDER)
                # `pack` fills the other buffer next, so its broadcast must be finished.
                other = broadcasts[(index + 1) % NUM_BUFFERS]
                if other is not None:
                    self._finish(other)
        with _connection_errors(RECEIVERS_LOST):
            for broadcast in filter(None, broadcasts):
                self._finish(broadcast)
            self._announce(None)

    def _announce(self, packed: Sequence[PackedTensor] | None) -> None:
        """Announce the tensors of the next part; None is the end."""
        key = f"{self._number}/{len(self._announced)}"
        self._store.set(key, json.dumps(packed))
        self._announced.append(key)


class WeightReceiver(_Endpoint):
    """The receiving end, in one worker of an engine."""

    def __init__(
        self, address: str, device: torch.device, factory: GroupFactory = make_group
    ) -> None:
        """Join the broadcast at that address. Raises ConnectionError."""
        self.address = address
        host, port, size = address.rsplit(":", 2)
        with _connection_errors(SENDER_LOST):
            super().__init__(host, int(port), device, factory)
            self._rank, self._size = self._store.add("workers", 1), int(size)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a copy of each tensor of the next transfer.

        Raises ConnectionError where the transfer does not begin, or breaks off.
        """
        with _connection_errors(SENDER_LOST):
            self._begin_transfer()
        buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        for part in itertools.count():
            with _connection_errors(SENDER_LOST):
                announced = json.loads(self._store.get(f"{self._number}/{part}"))
            if announced is None:
                return
            packed = [PackedTensor(*fields) for fields in announced]
            index, num_bytes = part % NUM_BUFFERS, packed[-1].start + packed[-1].num_bytes
            buffer = buffers[index]
            if buffer is None or len(buffer) < num_bytes:
                buffer = buffers[index] = self._new_buffer(num_bytes)
            with _connection_errors(SENDER_LOST):
                self._finish(self._group.broadcast(buffer[:num_bytes], SENDER))
            yield from streams.unpack(buffer, packed)


@contextlib.contextmanager
def _connection_errors(message: str) -> Iterator[None]:
    """Raise ConnectionError, with `message`, for torch's errors of stores and process groups."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{message}: {error}") from error


class NcclSender(StreamSender):
    """The part on a rank; only the first one sends."""

    _broadcast: WeightBroadcast | None = None

    def open(self, host: str, num_receivers: int) -> str:
        """Let `num_receivers` workers on other devices join; returns the address."""
        self._broadcast = WeightBroadcast(host, num_receivers, self.rank.device)
        return self._broadcast.address

    def transfer(
        self, named: NamedTensors, address: str, num_receivers: int, dtype: torch.dtype
    ) -> TransferStats:
        if self._broadcast is not None:
            return self._broadcast.send(named, dtype)
        for _ in named:  # gather the tensors with the first rank
            pass
        return TransferStats()


class NcclReceiver:
    """The part in an engine's worker, which joins each new broadcast."""

    _end: WeightReceiver | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def receive(self, address: str) -> Iterator[tuple[str, Tensor]]:
        """Receive the next transfer of the broadcast. Raises ConnectionError."""
        if self._end is None or self._end.address != address:
            self._end = WeightReceiver(address, self._device)
        return self._end.receive()


class Nccl(Stream):
    """The first rank broadcasts to the workers of all engines, on devices of their own."""

    sender = NcclSender
    receiver = NcclReceiver
    _address: str | None = None
    """The broadcast that the current engines have joined."""

    @classmethod
    def problems(cls, config: Config, engine: type[RolloutEngine]) -> Iterator[ConfigError]:
        """Yield also that engines are on the ranks' devices, or would keep the ranks waiting."""
        yield from super().problems(config, engine)
        rollout = config.actor_rollout_ref.rollout
        if not config.placement.is_split:
            expected = "files or ipc: nccl is for engines of the run on devices of their own"
            fix = f"trainer.rollout_gpus=N and fewer trainer.n_gpus_per_node, or {OPTION}=files"
            yield ConfigError(explain(OPTION, "nccl", expected, fix))
        if rollout.max_staleness > 0 and not rollout.partial:
            expected = (
                f"true with {OPTION}=nccl: ranks would wait for engines to finish whole "
                "trajectories"
            )
            fix = f"{ROLLOUT}.partial=true, or {OPTION}=files"
            yield ConfigError(explain(f"{ROLLOUT}.partial", "false", expected, fix))

    def open(self, ranks: Ranks, devices: Sequence[str]) -> tuple[str, Sequence[int]]:
        """Open a broadcast from the first rank, unless the engines have joined one."""
        group = ranks.group
        if self._address is None:
            host = group.locations()[0].host
            call = group.submit(0, "sender.open", host, len(devices))
            self._address = str(group.gather([call])[0])
        return self._address, [0] * len(group)

    def resend(self, engines: Engines) -> None:
        """Send again, by a new broadcast that the new engines join."""
        self._address = None
        super().resend(engines)
