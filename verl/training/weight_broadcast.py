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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.training import weight_packing
from verl.training.weight_delta import KeptWeights
from verl.training.weight_packing import NUM_BUFFERS, Packed, Packer, Sent, unpacked

SCHEME = "nccl:"
"""How the name of such a stream begins; the address of its store and the group's size follow."""
SENDER = 0
NOTHING = 0
"""The number of no hand-over."""

logger = logging.getLogger(__name__)
_TcpStore = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it, mypy does not see how


class WeightBroadcast:
    """The sending end: the store, and the group as soon as all have come."""

    def __init__(
        self, host: str, num_receivers: int, device: torch.device, sends_changes: bool = False
    ) -> None:
        """Listen at this machine's address `host` for so many workers."""
        self._device, self._size = device, num_receivers + 1
        self._kept = KeptWeights() if sends_changes else None
        self._base = NOTHING
        """The hand-over of which the weights are kept."""
        self._store = _store(host, 0, is_master=True)
        self._store.set("sends_changes", str(sends_changes))
        self.stream = f"{SCHEME}{host}:{self._store.port}:{self._size}"
        """What workers call it."""
        self._group: Any = None
        self._number = 0

    def send(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Sent:
        """Give tensors, as `dtype`, to all workers, each of which calls `received` for it.

        The iteration runs to its end in any case: ranks gather tensors together. Where workers do
        not come, or are lost, nobody has the weights; who started them notices. Its seconds are
        those in which this rank waited, packed and sent.
        """
        begin = time.perf_counter()
        self._number += 1
        sender = _Sender(self._store, self._number, self._device, self._kept)
        base, self._base = self._base, NOTHING
        with sender.noting():
            _meet(self._store, self._number, self._size)
            if self._kept is not None:
                self._agree(self._kept, base)
            self._group = self._group or _group(self._store, SENDER, self._size, self._device)
        sender.group = self._group
        sender.sent.seconds = time.perf_counter() - begin
        sender.pack(named, dtype)
        self._base = self._number if sender.has_receivers else NOTHING
        return sender.sent

    def _agree(self, kept: KeptWeights, base: int) -> None:
        """Say which hand-over the next one is changes of; where one worker lacks it, of none."""
        if self._store.add(f"{self._number}/has/{base}", 0) < self._size - 1:
            base = NOTHING
        if base == NOTHING:
            kept.tensors.clear()
        self._store.set(f"{self._number}/base", str(base))


class WeightReceiver:
    """The receiving end, of one worker."""

    def __init__(self, stream: str, device: torch.device) -> None:
        """Join the group of that name. Raises ConnectionError."""
        self.stream, self._device = stream, device
        host, port, size = stream.removeprefix(SCHEME).rsplit(":", 2)
        self._size = int(size)
        with _translated():
            self._store = _store(host, int(port), is_master=False)
            self._rank = self._store.add("workers", 1)
            keeps = self._store.get("sends_changes") == b"True"
        self._kept = KeptWeights() if keeps else None
        self._base = NOTHING
        """The hand-over of which the weights are kept."""
        self._group: Any = None
        self._number = 0

    def received(self) -> Iterator[tuple[str, Tensor]]:
        """Name and copy of each tensor of the next weights; where they are kept, in host memory
        that those after them are written into.

        Raises ConnectionError where they do not come, or end.
        """
        self._number += 1
        base, self._base = self._base, NOTHING
        with _translated():
            self._store.add(f"{self._number}/has/{base}", 1)
            _meet(self._store, self._number, self._size)
            self._group = self._group or _group(self._store, self._rank, self._size, self._device)
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
        with _translated():
            expected = int(self._store.get(f"{self._number}/base"))
        if expected == NOTHING:
            kept.tensors.clear()
        elif expected != base:
            raise ConnectionError(f"changes of hand-over {expected} came to a worker with {base}")

    def _sent(self) -> Iterator[tuple[str, Tensor]]:
        """Name and copy of each tensor, or of its changes, of the present hand-over."""
        buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        for part in itertools.count():
            with _translated():
                said = json.loads(self._store.get(self._key(part)))
            if said is None:
                return
            if not said:
                continue
            packed = [Packed(**one) for one in said]
            slot, num_bytes = part % NUM_BUFFERS, _end(packed)
            buffer = buffers[slot]
            if buffer is None or len(buffer) < num_bytes:
                buffer = buffers[slot] = _empty(num_bytes, self._device)
            with _translated():
                self._group.broadcast(buffer[:num_bytes], SENDER).wait()
            yield from unpacked(buffer, packed)

    def _key(self, part: int) -> str:
        return f"{self._number}/{part}"


class _Sender(Packer):
    """To a group, unless it is broken."""

    def __init__(
        self, store: Any, number: int, device: torch.device, kept: KeptWeights | None
    ) -> None:
        super().__init__(device)
        self._kept = kept
        self.group: Any = None
        self._store, self._number, self._num_parts = store, number, 0
        self._sent: list[Any] = [None] * NUM_BUFFERS
        self._said_at = time.monotonic()
        self._is_broken = False

    @property
    def has_receivers(self) -> bool:
        """All of them, or none."""
        return not self._is_broken

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """The body ends early, and nothing more is sent, where the group is broken."""
        try:
            yield
        except RuntimeError as error:  # torch's errors of stores and groups
            logger.warning("engines do not take new weights: %s", error)
            self._is_broken = True

    def encoded(self, name: str, tensor: Tensor) -> Tensor | None:
        """What changed of it, where weights are kept."""
        if self._kept is None:
            return tensor
        if time.monotonic() - self._said_at > weight_packing.PATIENCE_S / 4:
            with self.noting():  # few changes may fill no buffer before patience ends
                self._say([])
        encoded, num_changed = self._kept.replace(name, tensor)
        self.sent.num_changed += num_changed
        self.sent.num_elements += tensor.numel()
        return encoded

    def new_buffer(self, slot: int, num_bytes: int) -> Tensor:
        """Memory of the device."""
        return _empty(num_bytes, self.device)

    def send(self, slot: int, buffer: Tensor, packed: list[Packed]) -> None:
        """Begin to broadcast what the slot holds."""
        with self.noting():
            self._say(packed)
            self._sent[slot] = self.group.broadcast(buffer[: _end(packed)], SENDER)

    def wait(self, slot: int) -> None:
        """Until it may be filled again."""
        sent, self._sent[slot] = self._sent[slot], None
        if sent is not None:
            with self.noting():
                sent.wait()

    def end(self) -> None:
        """Nothing in place of a part."""
        with self.noting():
            self._say(None)

    def _say(self, packed: Sequence[Packed] | None) -> None:
        """What the next part holds; of one without tensors, that there will be others."""
        said = packed if packed is None else [asdict(one) for one in packed]
        self._store.set(f"{self._number}/{self._num_parts}", json.dumps(said))
        self._num_parts, self._said_at = self._num_parts + 1, time.monotonic()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise ConnectionError for torch's errors of stores and groups."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the training rank sends no weights: {error}") from error


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _end(packed: Sequence[Packed]) -> int:
    return packed[-1].start + packed[-1].num_bytes


def _meet(store: Any, number: int, size: int) -> None:
    """Wait until all are there for the weights of that number."""
    key = f"{number}/here"
    if store.add(key, 1) == size:
        store.set(f"{number}/begin", "")
    store.wait([f"{number}/begin"])


def _store(host: str, port: int, is_master: bool) -> Any:
    patience = timedelta(seconds=weight_packing.PATIENCE_S)
    return _TcpStore(host, port, is_master=is_master, wait_for_workers=False, timeout=patience)


def _group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A process group beside the process's own."""
    patience = timedelta(seconds=weight_packing.PATIENCE_S)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, patience)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience  # it has no other setter
    return dist.ProcessGroupNCCL(store, rank, size, options)
