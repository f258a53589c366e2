"""Weight transfer from the first training rank to engines on other devices, by NCCL (CPU: gloo).

The rank and the workers of all engines form one process group, separate from the ranks' and the
engines' own groups. The rank packs gathered tensors, in the engine's dtype, into one of two buffers
while the other one is broadcast. The content of each buffer is announced in the group's store, as
JSON. Transfers are numbered from 1. With `sends_changes`, both ends keep the weights of the last
transfer and only changed elements are sent, provided that every worker received it completely.

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

from verl.training import weight_stream
from verl.training.weight_stream import NUM_BUFFERS, NamedTensors, PackedTensor, TransferStats

SCHEME = "nccl:"
"""Prefix of a broadcast's stream name; the address of its store and the group's size follow."""
SENDER = 0
NO_TRANSFER = 0
"""Transfer number that means "no weights are kept"."""
RECEIVERS_LOST = "the engines did not receive the new weights"
SENDER_LOST = "the training rank did not send its weights"
BLOCK_BITS = 16
"""Low bits of an element's position, which are its offset in its block; the others number it."""
BITS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by element size, to compare elements bit for bit."""
CHANGES = torch.uint8
"""Dtype of encoded changes, which no weights have."""

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


class KeptWeights:
    """The weights of the last transfer, in host memory and in the engine's dtype.

    Sender and receivers keep the same. The next weights are sent as changes: the elements whose
    bits differ, with their positions; so a NaN equals itself, and -0.0 differs from 0.0. For a
    tensor of n elements of s bytes, k of them changed, the encoded changes are, one after another:
    the number of changed elements in each block of 65,536 (int32), the k new values, and their k
    offsets within their blocks (2 bytes each). Where these 4 ceil(n / 65536) + k (s + 2) bytes are
    no fewer than n s, the whole tensor is sent: from half of its elements on in bfloat16, from two
    thirds in float32.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def replace(self, name: str, tensor: Tensor) -> tuple[Tensor | None, int]:
        """Keep `tensor` in place of the old one of that name.

        Returns what receivers must `apply`, None if nothing, and the number of changed elements.
        """
        update, num_changed = tensor, tensor.numel()
        if name in self.tensors:
            update, num_changed = encode_changes(self.tensors[name].to(tensor.device), tensor)
            if num_changed == 0:
                return None, 0
        self.apply(name, update)
        return update, num_changed

    def apply(self, name: str, update: Tensor) -> None:
        """Update the tensor of that name with encoded changes, or replace it by a whole tensor."""
        if update.dtype == CHANGES:
            apply_changes(self.tensors[name], update.cpu())
        else:
            self.tensors[name] = update.to("cpu", copy=True, memory_format=torch.contiguous_format)


def encode_changes(old: Tensor, new: Tensor) -> tuple[Tensor, int]:
    """Encode the changes from `old` to `new`, (num_bytes,), and count the changed elements."""
    new_bits, old_bits = _as_integers(new), _as_integers(old)
    differs = new_bits != old_bits
    num_changed = int(differs.count_nonzero())
    num_blocks = _num_blocks(new_bits)
    if 4 * num_blocks + num_changed * (new.itemsize + 2) >= new.nbytes:
        return new, num_changed  # the encoding would not be smaller
    positions = differs.nonzero().view(-1)
    counts = torch.bincount(positions >> BLOCK_BITS, minlength=num_blocks).to(torch.int32)
    parts = counts, new_bits[positions], positions.to(torch.int16)  # the lowest 16 bits
    return torch.cat([part.view(CHANGES) for part in parts]), num_changed


def apply_changes(tensor: Tensor, encoded: Tensor) -> None:
    """Turn the `old` tensor of `encode_changes` into the new one, in place."""
    bits = _as_integers(tensor)
    num_blocks = _num_blocks(bits)
    counts = encoded[: 4 * num_blocks].view(torch.int32)
    end = 4 * num_blocks + int(counts.sum()) * bits.itemsize
    blocks = torch.arange(num_blocks).repeat_interleave(counts) << BLOCK_BITS
    offsets = encoded[end:].view(torch.int16).long() & ((1 << BLOCK_BITS) - 1)
    bits[blocks + offsets] = encoded[4 * num_blocks : end].view(bits.dtype)


def _as_integers(tensor: Tensor) -> Tensor:
    """View the elements as integers, (num_elements,); shares memory if `tensor` is contiguous."""
    return tensor.reshape(-1).view(BITS[tensor.itemsize])


def _num_blocks(bits: Tensor) -> int:
    return -(-len(bits) >> BLOCK_BITS)


class _Endpoint:
    """What both ends share: the store, and the process group once everybody has joined."""

    _rank = SENDER
    _size = 0
    _number = 0
    """Number of the current transfer."""
    _group: Any = None
    _kept: KeptWeights | None = None
    _base = NO_TRANSFER
    """Number of the transfer whose weights are kept."""

    def __init__(self, host: str, port: int, device: torch.device, factory: GroupFactory) -> None:
        """Connect to the store at `port`, or create it if `port` is 0."""
        self._device, self._factory = device, factory
        self._timeout = timedelta(seconds=weight_stream.CONNECT_TIMEOUT_S)
        self._store = _TcpStore(
            host, port, is_master=port == 0, wait_for_workers=False, timeout=self._timeout
        )

    def _begin_transfer(self) -> int:
        """Number the next transfer and return the one whose weights are kept."""
        self._number += 1
        base, self._base = self._base, NO_TRANSFER  # until this transfer has succeeded
        return base

    def _wait_for_all(self) -> None:
        """Wait until all members are ready for the transfer; the first time, create the group."""
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
            finish(work, weight_stream.CONNECT_TIMEOUT_S)
        except RuntimeError:
            self._group.abort()  # ends a kernel that waits for the lost member
            raise

    def _new_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class WeightBroadcast(_Endpoint):
    """The sending end, on the first training rank."""

    _announced_at = 0.0

    def __init__(
        self, host: str, num_receivers: int, device: torch.device, sends_changes: bool = False,
        factory: GroupFactory = make_group,
    ) -> None:  # fmt: skip
        """Listen at this machine's address `host` for `num_receivers` workers."""
        super().__init__(host, 0, device, factory)
        self._size = num_receivers + 1
        self._kept = KeptWeights() if sends_changes else None
        self._announced: list[str] = []  # keys of the current transfer's parts in the store
        self._store.set("sends_changes", str(sends_changes))
        self.stream = f"{SCHEME}{host}:{self._store.port}:{self._size}"
        """Name by which workers join."""

    def send(self, named: NamedTensors, dtype: torch.dtype) -> TransferStats:
        """Send tensors, as `dtype`, to all workers, each of which iterates `receive`.

        `named` is always iterated to its end, because the ranks gather the tensors together. If a
        worker does not join or is lost, no worker gets the weights; the process that started the
        worker notices. The seconds returned include waiting for the workers.
        """
        begin, stats = time.perf_counter(), TransferStats()
        tensors = weight_stream.cast_tensors(named, self._device, dtype, stats)
        try:
            self._send(tensors, stats)
        except ConnectionError as error:
            logger.warning("%s", error)
            for _ in tensors:
                pass
        stats.seconds += time.perf_counter() - begin
        return stats

    def _send(self, named: NamedTensors, stats: TransferStats) -> None:
        base = self._begin_transfer()
        self._announced_at = time.monotonic()
        with _connection_errors(RECEIVERS_LOST):
            self._wait_for_all()
            while self._announced:  # every worker is done with the last transfer
                self._store.delete_key(self._announced.pop())
            if self._kept is not None:
                self._choose_base(self._kept, base)
                named = self._encode_changes(self._kept, named, stats)
        broadcasts: list[Any] = [None] * NUM_BUFFERS
        for index, filled, packed in weight_stream.pack(named, lambda _, n: self._new_buffer(n)):
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
        self._base = self._number

    def _choose_base(self, kept: KeptWeights, base: int) -> None:
        """Announce the transfer that the changes refer to; none unless every worker has it."""
        if self._store.add(f"{self._number}/has/{base}", 0) < self._size - 1:
            base = NO_TRANSFER
        if base == NO_TRANSFER:
            kept.tensors.clear()
        self._store.set(f"{self._number}/base", str(base))

    def _encode_changes(
        self, kept: KeptWeights, named: NamedTensors, stats: TransferStats
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the encoded changes of each tensor that changed."""
        for name, tensor in named:
            if time.monotonic() - self._announced_at > weight_stream.CONNECT_TIMEOUT_S / 4:
                with _connection_errors(RECEIVERS_LOST):
                    # Few changes may fill no buffer before the workers' timeout.
                    self._announce([])
            update, num_changed = kept.replace(name, tensor)
            stats.num_changed += num_changed
            stats.num_elements += tensor.numel()
            if update is not None:
                yield name, update
            del tensor, update  # free them before the next one is gathered

    def _announce(self, packed: Sequence[PackedTensor] | None) -> None:
        """Announce the tensors of the next part: [] keeps the workers waiting, None is the end."""
        key = f"{self._number}/{len(self._announced)}"
        self._store.set(key, json.dumps(packed))
        self._announced.append(key)
        self._announced_at = time.monotonic()


class WeightReceiver(_Endpoint):
    """The receiving end, in one worker of an engine."""

    def __init__(
        self, stream: str, device: torch.device, factory: GroupFactory = make_group
    ) -> None:
        """Join the broadcast of that name. Raises ConnectionError."""
        self.stream = stream
        host, port, size = stream.removeprefix(SCHEME).rsplit(":", 2)
        with _connection_errors(SENDER_LOST):
            super().__init__(host, int(port), device, factory)
            self._rank, self._size = self._store.add("workers", 1), int(size)
            keeps_weights = self._store.get("sends_changes") == b"True"
        self._kept = KeptWeights() if keeps_weights else None

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a copy of each tensor of the next transfer.

        With `sends_changes` the copies are the kept weights, which later transfers overwrite.
        Raises ConnectionError where the transfer does not begin, or breaks off.
        """
        base = self._begin_transfer()
        with _connection_errors(SENDER_LOST):
            self._store.add(f"{self._number}/has/{base}", 1)
            self._wait_for_all()
        if self._kept is None:
            yield from self._receive_parts()
            return
        self._check_base(self._kept, base)
        for name, update in self._receive_parts():
            self._kept.apply(name, update)
        self._base = self._number
        yield from self._kept.tensors.items()

    def _check_base(self, kept: KeptWeights, base: int) -> None:
        """Raise ConnectionError if the changes refer to another transfer than `base`."""
        with _connection_errors(SENDER_LOST):
            expected = int(self._store.get(f"{self._number}/base"))
        if expected == NO_TRANSFER:
            kept.tensors.clear()
        elif expected != base:
            raise ConnectionError(
                f"the changes refer to weight transfer {expected}, but this worker has {base}"
            )

    def _receive_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a copy of each tensor, or of its changes, in this transfer."""
        buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        for part in itertools.count():
            with _connection_errors(SENDER_LOST):
                announced = json.loads(self._store.get(f"{self._number}/{part}"))
            if announced is None:
                return
            if not announced:
                continue
            packed = [PackedTensor(*fields) for fields in announced]
            index, num_bytes = part % NUM_BUFFERS, packed[-1].start + packed[-1].num_bytes
            buffer = buffers[index]
            if buffer is None or len(buffer) < num_bytes:
                buffer = buffers[index] = self._new_buffer(num_bytes)
            with _connection_errors(SENDER_LOST):
                self._finish(self._group.broadcast(buffer[:num_bytes], SENDER))
            yield from weight_stream.unpack(buffer, packed)


@contextlib.contextmanager
def _connection_errors(message: str) -> Iterator[None]:
    """Raise ConnectionError, with `message`, for torch's errors of stores and process groups."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{message}: {error}") from error
