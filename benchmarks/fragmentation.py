"""Measure what torch's CUDA allocator needs beyond tensors: `python -m benchmarks.fragmentation`.

No card is used. Micro-batches of a model with the widths of Qwen2.5-7B run on meta tensors, each
with other lengths; their allocations, with those of the gathered blocks, are replayed through a
model of the caching allocator (c10/cuda/CUDACachingAllocator.cpp), once with its usual segments and
once with expandable ones. Printed is the smallest card memory in which the replay finishes,
relative to the most bytes that tensors have at the same time.
"""

from __future__ import annotations

import argparse
import bisect
import random
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.ext.memory.trial import StorageTracker
from verl.training.attention import PACKED, SequenceBounds
from verl.training.models import LogProbModel, PackedInputs, blocks, recompute, trunk_of

MIB = 1 << 20
SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT = MIB, 2 * MIB, 10 * MIB, 20 * MIB
"""Requests up to SMALL share segments of 2 MiB, those below MIDDLE segments of 20 MiB; larger ones
get segments of their own, in steps of 2 MiB."""
UNIT = 512
"""Requests are rounded up to multiples of this many bytes."""
Event = tuple[int, int]
"""A tensor's number and its bytes, 0 when it is freed."""

console = Console(soft_wrap=True)


class OutOfMemory(Exception):
    """The card's memory is too small for the replay."""


class Block:
    """A range of a segment, free or used, between its neighbours."""

    def __init__(self, size: int, before: Block | None = None, after: Block | None = None) -> None:
        self.size, self.before, self.after, self.is_free = size, before, after, True


class CachingAllocator:
    """The usual allocator: best fit in cached segments, which are split and merged, never moved."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        size = -(-size // UNIT) * UNIT
        is_small = size <= SMALL
        pool = self._free[is_small]
        index = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(index)[2] if index < len(pool) else self._new_segment(size)
        block.is_free, rest = False, block.size - size
        if rest >= UNIT if is_small else rest > SMALL:
            tail = Block(rest, block, block.after)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            self._put(tail, is_small)
        block.is_small = is_small  # type: ignore[attr-defined]
        return block

    def free(self, block: Block) -> None:
        is_small, block.is_free = block.is_small, True  # type: ignore[attr-defined]
        if block.after is not None and block.after.is_free:
            self._take(block.after, is_small)
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        if block.before is not None and block.before.is_free:
            self._take(block.before, is_small)
            block.before.size += block.size
            block.before.after = block.after
            if block.after is not None:
                block.after.before = block.before
            block = block.before
        self._put(block, is_small)

    def _put(self, block: Block, is_small: bool) -> None:
        bisect.insort(self._free[is_small], (block.size, id(block), block))

    def _take(self, block: Block, is_small: bool) -> None:
        pool = self._free[is_small]
        del pool[bisect.bisect_left(pool, (block.size, id(block)))]

    def _new_segment(self, size: int) -> Block:
        whole = SMALL_SEGMENT if size <= SMALL else MIDDLE_SEGMENT
        if size >= MIDDLE:
            whole = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.reserved + whole > self.capacity:
            self._release_cached()
        if self.reserved + whole > self.capacity:
            raise OutOfMemory
        self.reserved += whole
        return Block(whole)

    def _release_cached(self) -> None:
        """Give back the segments that are free as a whole, as torch does before it gives up."""
        for is_small, pool in self._free.items():
            whole = [entry for entry in pool if entry[2].before is entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[is_small] = [entry for entry in pool if entry not in whole]


class ExpandableAllocator:
    """Expandable segments: address ranges without end, whose pages are mapped and given back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pools = {True: Pages(SMALL_SEGMENT), False: Pages(MIDDLE_SEGMENT)}

    def allocate(self, size: int) -> tuple[bool, int, int]:
        size = -(-size // UNIT) * UNIT
        is_small = size <= SMALL
        start = self._pools[is_small].place(size)
        if self._mapped() > self.capacity:
            for pool in self._pools.values():
                pool.unmap_free()
        if self._mapped() > self.capacity:
            raise OutOfMemory
        return is_small, start, size

    def free(self, block: tuple[bool, int, int]) -> None:
        is_small, start, size = block
        self._pools[is_small].remove(start, size)

    def _mapped(self) -> int:
        return sum(len(pool.mapped) * pool.page for pool in self._pools.values())


class Pages:
    """One address range: the used blocks, in order, and the pages that are mapped."""

    def __init__(self, page: int) -> None:
        self.page, self.mapped = page, set[int]()
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def place(self, size: int) -> int:
        """Map and use the smallest mapped gap that fits, otherwise the end."""
        end, best = 0, None
        for start, length in zip(self._starts, self._sizes, strict=True):
            gap = start - end
            is_better = best is None or gap < best[1]
            if gap >= size and is_better and self._is_mapped(end, size):
                best = (end, gap)
            end = start + length
        position = end if best is None else best[0]
        self.mapped |= set(self._pages(position, size))
        index = bisect.bisect(self._starts, position)
        self._starts.insert(index, position)
        self._sizes.insert(index, size)
        return position

    def remove(self, start: int, size: int) -> None:
        index = bisect.bisect_left(self._starts, start)
        del self._starts[index], self._sizes[index]

    def unmap_free(self) -> None:
        used = zip(self._starts, self._sizes, strict=True)
        self.mapped = {page for start, size in used for page in self._pages(start, size)}

    def _is_mapped(self, start: int, size: int) -> bool:
        return all(page in self.mapped for page in self._pages(start, size))

    def _pages(self, start: int, size: int) -> range:
        return range(start // self.page, (start + size - 1) // self.page + 1)


class Recorder(StorageTracker):
    """Records when storages are created and freed."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.events: list[Event] = []

    def changed(self, number: int, num_bytes: int) -> None:
        if num_bytes:
            self.events.append((number, max(num_bytes, 0)))


class GatheredBlocks:
    """Allocates a block's weights while it computes, as FSDP2 does, in a recorder's events."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.recorder: Recorder
        for block in blocks:
            block.register_forward_pre_hook(self._gather)
            block.register_forward_hook(self._drop)
            block.register_full_backward_pre_hook(self._gather)
            block.register_full_backward_hook(self._drop)
        self._held: dict[int, list[Tensor]] = {}

    def _gather(self, block: nn.Module, *_: object) -> None:
        self._held[id(block)] = [torch.empty_like(p) for p in block.parameters()]

    def _drop(self, block: nn.Module, *_: object) -> None:
        self._held.pop(id(block), None)


def build(layers: int, checkpointing: bool | str) -> LogProbModel:
    """Build a model with the widths of Qwen2.5-7B in bfloat16 on meta tensors."""
    config = Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=layers, vocab_size=152064,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, dtype=torch.bfloat16
        ).train()
    recompute(lm, checkpointing)
    return LogProbModel(lm)


def micro_batch(lengths: Sequence[int]) -> PackedInputs:
    """Return the inputs of dialogues of these lengths."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    spans, total = tuple((0, length) for length in lengths), sum(lengths)
    with torch.device("meta"):
        ids, targets = torch.zeros(1, total, dtype=torch.int64), torch.arange(1, total)
        bounds = SequenceBounds(spans, offsets.to("meta"), offsets.to("meta"))
        return PackedInputs(ids, bounds, targets, ids[0, targets], targets - 1)


def record(model: LogProbModel, batches: Sequence[Sequence[int]]) -> list[Event]:
    """Return the allocations and frees of a forward and backward pass of each micro-batch."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = [*model.parameters(), *model.buffers()]
    held += [p.grad for p in model.parameters() if p.grad is not None]
    events: list[Event] = []
    for lengths in batches:
        inputs, first = micro_batch(lengths), len(events)
        recorder = Recorder(held)
        with torch.device("meta"), recorder:
            model(inputs, 1.0)[0].sum().backward()
        events += [(first + number, size) for number, size in recorder.events]
    return events


def peak_bytes(events: Sequence[Event]) -> int:
    """Return the most bytes that exist at the same time."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for number, size in events:
        live += size - sizes.pop(number, 0)
        if size:
            sizes[number] = size
        peak = max(peak, live)
    return peak


def fits(events: Sequence[Event], allocator: CachingAllocator | ExpandableAllocator) -> bool:
    """Whether the events can be replayed in the allocator's memory."""
    blocks: dict[int, Any] = {}
    try:
        for number, size in events:
            if size:
                blocks[number] = allocator.allocate(size)
            else:
                allocator.free(blocks.pop(number))
    except OutOfMemory:
        return False
    return True


def least_memory(
    events: Sequence[Event], kind: type[CachingAllocator | ExpandableAllocator], steps: int = 7
) -> int:
    """Return the smallest memory in which the events can be replayed, in bytes."""
    peak = peak_bytes(events)
    low, high = peak, 2 * peak
    for _ in range(steps):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(events, kind(middle)) else (middle, high)
    return high


def draw(budget: int, longest: int, number: int, seed: int) -> list[list[int]]:
    """Draw micro-batches of dialogues of 300 to `longest` tokens, up to the token `budget` each."""
    source, batches = random.Random(seed), []
    for _ in range(number):
        lengths = list[int]()
        while sum(lengths) < budget - longest:
            lengths.append(source.randint(300, longest))
        batches.append(lengths)
    return batches


def main() -> None:
    """Print the need of both allocators for several budgets and kinds of checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for budget in args.budgets:
        for checkpointing in (True, "selective", False):
            model = build(args.layers, checkpointing)
            gathered = GatheredBlocks(blocks(trunk_of(model.lm), model.lm))
            events = record(model, draw(budget, 4096, args.batches, args.seed))
            shards = [4 * p.numel() // args.ranks for p in model.parameters() for _ in range(4)]
            events = [*((-1 - i, size) for i, size in enumerate(shards)), *events]
            peak = peak_bytes(events)
            needs = [least_memory(events, k) for k in (CachingAllocator, ExpandableAllocator)]
            usual, expandable = (need / peak for need in needs)
            console.print(
                f"{budget} tokens, checkpointing {checkpointing}: tensors {peak / 2**30:.2f} GiB "
                f"(shards {sum(shards) / 2**30:.2f}), usual segments {usual:.3f} of them, "
                f"expandable {expandable:.3f}; {len(events)} events"
            )
            del gathered


if __name__ == "__main__":
    main()
