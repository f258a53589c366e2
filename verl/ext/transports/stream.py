"""What the transports without files have in common: tensors packed into buffers, and their order.

A rank packs whole tensors, in the engine's dtype, into one of two buffers while workers of engines
copy them out of the other. Engines pause first, since a rank cannot wait for long dialogues.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, explain
from verl.rollout.interface import chosen
from verl.weights.files import ADDRESS, OPTION, Engines, Rank, Ranks, Transport

BUFFER_BYTES = 256 << 20
"""Size of each of the two buffers, unless a single tensor is larger."""
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Tensors start at multiples of this many bytes, which suits every dtype."""
CONNECT_TIMEOUT_S = 60.0
"""Seconds to wait for the other side to connect."""
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


class StreamSender:
    """The part on a training rank that sends to workers; subclasses say how."""

    def __init__(self, rank: Rank) -> None:
        """Send nothing yet."""
        self.rank = rank

    @abstractmethod
    def transfer(
        self, named: NamedTensors, address: str, num_receivers: int, dtype: torch.dtype
    ) -> TransferStats:
        """Send tensors, as `dtype`, to this rank's receivers; iterate `named` to its end."""

    def send(self, num_receivers: int, address: str, dtype: str) -> TransferStats:
        """Send the policy to `num_receivers` workers."""
        named = self.rank.policy_weights(dtype)
        stats = self.transfer(named, address, num_receivers, getattr(torch, dtype))
        dist.barrier()
        return stats

    def close(self) -> None:
        """Keep nothing: what was sent has left with its buffers."""


class Stream(Transport):
    """Ranks send the weights while the engines' workers receive them; subclasses say to whom."""

    _last: tuple[Ranks, int] | None = None
    """Ranks and version of the last `send`."""

    @classmethod
    def problems(cls, config: Config, engine: type[RolloutEngine]) -> Iterator[ConfigError]:
        """Yield that the engine cannot receive, or gets an adapter alone, which is small."""
        engines = chosen(config)
        if not engine.takes_streams or not engines.is_whole:
            reason = f"{engines.label} cannot receive weights"
            if engine.takes_streams:
                reason = "only the adapter is transferred, which is small"
            got, fix = config.actor_rollout_ref.rollout.weight_sync, f"{OPTION}=files"
            yield ConfigError(explain(OPTION, got, f"files: {reason}", fix))

    @classmethod
    def device_bytes(cls, largest: int) -> int:
        """Return the bytes of the buffers."""
        return NUM_BUFFERS * max(BUFFER_BYTES, largest)

    @abstractmethod
    def open(self, ranks: Ranks, devices: Sequence[str]) -> tuple[str, Sequence[int]]:
        """Return where workers on these devices receive, and how many of them each rank serves."""

    def send(self, ranks: Ranks, engines: Engines, version: int) -> dict[str, float]:
        """Pause the engines, then send the weights to their workers."""
        self._last = ranks, version
        start = time.perf_counter()
        devices = list(itertools.chain(*engines.call("engine.devices")))
        engines.pause(version)
        paused = time.perf_counter()
        address, receivers = self.open(ranks, devices)
        name = self.config.actor_rollout_ref.rollout.weight_sync
        engines.load([f"{name}{ADDRESS}{address}"] * len(engines.group), version)
        stats = ranks.group.scatter("sender.send", receivers, address, engines.dtype)
        write = max(rank.seconds for rank in stats)
        num_bytes = sum(rank.num_bytes for rank in stats)
        self.metrics = {"perf/weights_sent_bytes": float(num_bytes)}
        return {"wait": paused - start, "gather": time.perf_counter() - paused - write,
                "write": write}  # fmt: skip

    def resend(self, engines: Engines) -> None:
        """Send again from the ranks, which nothing has trained since."""
        if self._last is not None:
            ranks, version = self._last
            self.send(ranks, engines, version)
