"""New weights from the first training rank to engines on other devices, by NCCL (on a CPU by gloo).

The rank and the workers of all engines are one process group, apart from the ranks' and the
engines' own. The rank packs gathered tensors, in the engine's dtype, into one of two buffers while
the other is broadcast. What lies in a buffer is said in the group's store, as JSON. Hand-overs are
numbered from 1; where both ends keep their weights, only what changed since the last one is sent,
if every worker has that one whole.

vLLM's own transfer engine (0.32) needs NCCL and sends every shape through the driver; here a
machine without a card runs the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.training import weight_stream
from verl.training.weight_stream import NUM_BUFFERS, Named, Packed, Sent, coming, pack, unpacked

SCHEME = "nccl:"
"""How the name of such a stream begins; the address of its store and the group's size follow."""
SENDER = 0
NOTHING = 0
"""The number of no hand-over."""
NOT_TAKEN, NOT_SENT = "engines do not take new weights", "the training rank sends no weights"
BLOCK_BITS = 16
"""A block's number is what is left of a position without so many bits, which are the offset."""
BITS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: integers, which are compared bit for bit."""
CHANGES = torch.uint8
"""The dtype of changes, which no weights have."""

logger = logging.getLogger(__name__)
_TcpStore = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it, mypy does not see how


class KeptWeights:
    """The weights of the last hand-over, in host memory and in the engine's dtype; the same at both
    ends.

    New ones come as changes: elements whose bits differ, with their positions. NaN is equal to
    itself here, and -0.0 is not 0.0. Of n elements of s bytes of which k changed, the changes are,
    one behind the other: for each block of 65,536 elements how many of it changed (int32), the k
    new values, and their k offsets in their blocks (2 bytes each). Where these 4 ceil(n / 65536) +
    k (s + 2) bytes are no fewer than n s, the tensor goes whole: from half of its elements on in
    bfloat16, from two thirds in float32.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def replace(self, name: str, tensor: Tensor) -> tuple[Tensor | None, int]:
        """Keep `tensor` as the new one of that name; return what `take` is to be given for it at
        the other end, None where nothing changed, and how many elements changed."""
        sent, num_changed = tensor, tensor.numel()
        if name in self.tensors:
            sent, num_changed = changes(self.tensors[name].to(tensor.device), tensor)
        if num_changed == 0 and name in self.tensors:
            return None, 0
        self.take(name, sent)
        return sent, num_changed

    def take(self, name: str, sent: Tensor) -> None:
        """Keep what was sent: changes of the tensor of that name, or a whole one."""
        if sent.dtype == CHANGES:
            change(self.tensors[name], sent.cpu())
        else:
            self.tensors[name] = sent.to("cpu", copy=True, memory_format=torch.contiguous_format)


def changes(old: Tensor, new: Tensor) -> tuple[Tensor, int]:
    """What makes `new` of `old`, (num_bytes,), and how many elements that are; `new` itself where
    it is no larger."""
    bits, before = _bits(new), _bits(old)
    differs = bits != before
    num_changed, num_blocks = int(differs.count_nonzero()), _num_blocks(bits)
    if 4 * num_blocks + num_changed * (new.itemsize + 2) >= new.nbytes:
        return new, num_changed
    at = differs.nonzero().view(-1)
    counts = torch.bincount(at >> BLOCK_BITS, minlength=num_blocks).to(torch.int32)
    parts = counts, bits[at], at.to(torch.int16)  # the lowest 16 bits of a position
    return torch.cat([part.view(CHANGES) for part in parts]), num_changed


def change(tensor: Tensor, given: Tensor) -> None:
    """Make of the `old` tensor of `changes`, in place, the new one."""
    bits, num_blocks = _bits(tensor), _num_blocks(_bits(tensor))
    counts = given[: 4 * num_blocks].view(torch.int32)
    end = 4 * num_blocks + int(counts.sum()) * bits.itemsize
    blocks = torch.arange(num_blocks).repeat_interleave(counts) << BLOCK_BITS
    offsets = given[end:].view(torch.int16).long() & ((1 << BLOCK_BITS) - 1)
    bits[blocks + offsets] = given[4 * num_blocks : end].view(bits.dtype)


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, (num_elements,); the same memory where they lie in their order."""
    return tensor.reshape(-1).view(BITS[tensor.itemsize])


def _num_blocks(bits: Tensor) -> int:
    return -(-len(bits) >> BLOCK_BITS)


class _Member:
    """What both ends have: the store, and the group as soon as all have come."""

    _rank = SENDER
    _size = 0
    _number = 0
    """Of the present hand-over."""
    _group: Any = None
    _kept: KeptWeights | None = None
    _base = NOTHING
    """The hand-over of which the weights are kept."""

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        """Find the store at a port; make it at port 0."""
        self._device, self._patience = device, timedelta(seconds=weight_stream.PATIENCE_S)
        self._store = _TcpStore(
            host, port, is_master=port == 0, wait_for_workers=False, timeout=self._patience
        )

    def _begin(self) -> int:
        """Number the next hand-over; returns the one of which the weights are kept."""
        self._number += 1
        base, self._base = self._base, NOTHING
        return base

    def _meet(self) -> None:
        """Wait until all are there for the hand-over."""
        if self._store.add(f"{self._number}/here", 1) == self._size:
            self._store.set(f"{self._number}/begin", "")
        self._store.wait([f"{self._number}/begin"])
        if self._group is not None:
            return
        if self._device.type != "cuda":
            self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, self._patience)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._patience  # it has no other setter
        self._group = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class WeightBroadcast(_Member):
    """The sending end."""

    _num_parts = 0
    _said_at = 0.0

    def __init__(
        self, host: str, num_receivers: int, device: torch.device, sends_changes: bool = False
    ) -> None:
        """Listen at this machine's address `host` for so many workers."""
        super().__init__(host, 0, device)
        self._size = num_receivers + 1
        self._kept = KeptWeights() if sends_changes else None
        self._store.set("sends_changes", str(sends_changes))
        self.stream = f"{SCHEME}{host}:{self._store.port}:{self._size}"
        """What workers call it."""

    def send(self, named: Named, dtype: torch.dtype) -> Sent:
        """Give tensors, as `dtype`, to all workers, each of which calls `received` for it.

        The iteration runs to its end in any case: ranks gather tensors together. Where workers do
        not come, or are lost, nobody has the weights; who started them notices. Its seconds are
        those in which this rank waited, packed and sent.
        """
        begin, sent = time.perf_counter(), Sent()
        tensors = coming(named, self._device, dtype, sent)
        try:
            self._send(tensors, sent)
        except ConnectionError as error:
            logger.warning("%s", error)
            for _ in tensors:
                pass
        sent.seconds += time.perf_counter() - begin
        return sent

    def _send(self, named: Named, sent: Sent) -> None:
        base, self._num_parts, self._said_at = self._begin(), 0, time.monotonic()
        with _translated(NOT_TAKEN):
            self._meet()
            if self._kept is not None:
                self._agree(self._kept, base)
                named = self._changes(self._kept, named, sent)
        works: list[Any] = [None] * NUM_BUFFERS
        for slot, filled, packed in pack(named, lambda _, num_bytes: self._buffer(num_bytes)):
            sent.num_bytes += len(filled)
            with _translated(NOT_TAKEN):
                self._say(packed)
                works[slot] = self._group.broadcast(filled, SENDER)
                before = works[(slot + 1) % NUM_BUFFERS]
                if before is not None:
                    before.wait()
        with _translated(NOT_TAKEN):
            for work in filter(None, works):
                work.wait()
            self._say(None)
        self._base = self._number

    def _agree(self, kept: KeptWeights, base: int) -> None:
        """Say which hand-over the next one is changes of; where one worker lacks it, of none."""
        if self._store.add(f"{self._number}/has/{base}", 0) < self._size - 1:
            base = NOTHING
        if base == NOTHING:
            kept.tensors.clear()
        self._store.set(f"{self._number}/base", str(base))

    def _changes(self, kept: KeptWeights, named: Named, sent: Sent) -> Iterator[tuple[str, Tensor]]:
        """What changed of each tensor."""
        for name, tensor in named:
            if time.monotonic() - self._said_at > weight_stream.PATIENCE_S / 4:
                with _translated(NOT_TAKEN):  # few changes may fill no buffer before patience ends
                    self._say([])
            encoded, num_changed = kept.replace(name, tensor)
            sent.num_changed += num_changed
            sent.num_elements += tensor.numel()
            if encoded is not None:
                yield name, encoded
            del tensor, encoded  # before the next one is gathered

    def _say(self, packed: Sequence[Packed] | None) -> None:
        """What the next part holds; of one without tensors, that there will be others; None for the
        end."""
        self._store.set(f"{self._number}/{self._num_parts}", json.dumps(packed))
        self._num_parts, self._said_at = self._num_parts + 1, time.monotonic()


class WeightReceiver(_Member):
    """The receiving end, of one worker."""

    def __init__(self, stream: str, device: torch.device) -> None:
        """Join the group of that name. Raises ConnectionError."""
        self.stream = stream
        host, port, size = stream.removeprefix(SCHEME).rsplit(":", 2)
        with _translated(NOT_SENT):
            super().__init__(host, int(port), device)
            self._rank, self._size = self._store.add("workers", 1), int(size)
            keeps = self._store.get("sends_changes") == b"True"
        self._kept = KeptWeights() if keeps else None

    def received(self) -> Iterator[tuple[str, Tensor]]:
        """Name and copy of each tensor of the next weights; where they are kept, in host memory
        that those after them are written into.

        Raises ConnectionError where they do not come, or end.
        """
        base = self._begin()
        with _translated(NOT_SENT):
            self._store.add(f"{self._number}/has/{base}", 1)
            self._meet()
        if self._kept is None:
            yield from self._sent()
            return
        self._agree(self._kept, base)
        for name, sent in self._sent():
            self._kept.take(name, sent)
        self._base = self._number
        yield from self._kept.tensors.items()

    def _agree(self, kept: KeptWeights, base: int) -> None:
        """Raise ConnectionError where other weights than those of `base` are about to change."""
        with _translated(NOT_SENT):
            expected = int(self._store.get(f"{self._number}/base"))
        if expected == NOTHING:
            kept.tensors.clear()
        elif expected != base:
            raise ConnectionError(f"changes of hand-over {expected} came to a worker with {base}")

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        """Name and copy of each tensor, or of its changes, of the present hand-over."""
        buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        for part in itertools.count():
            with _translated(NOT_SENT):
                said = json.loads(self._store.get(f"{self._number}/{part}"))
            if said is None:
                return
            if not said:
                continue
            packed = [Packed(*one) for one in said]
            slot, num_bytes = part % NUM_BUFFERS, packed[-1].start + packed[-1].num_bytes
            buffer = buffers[slot]
            if buffer is None or len(buffer) < num_bytes:
                buffer = buffers[slot] = self._buffer(num_bytes)
            with _translated(NOT_SENT):
                self._group.broadcast(buffer[:num_bytes], SENDER).wait()
            yield from unpacked(buffer, packed)


@contextlib.contextmanager
def _translated(said: str) -> Iterator[None]:
    """Raise ConnectionError for torch's errors of stores and groups."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{said}: {error}") from error
