"""New weights as changes of those before: the elements whose bits differ, with their positions.

Both ends keep the weights of the last hand-over in host memory, in the engine's dtype, and compare
and replace bits: NaN is equal to itself here, and -0.0 is not 0.0.

Of n elements of s bytes of which k changed, the changes are, one behind the other: for each block
of 65,536 elements how many of it changed (int32), the k new values, and their k offsets in their
blocks (2 bytes each). Where these 4 ceil(n / 65536) + k (s + 2) bytes are no fewer than n s, the
tensor goes whole: from half of its elements on in bfloat16, from two thirds in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BITS = 16
"""A block's number is what is left of a position without so many bits, which are the offset."""
BITS = {2: torch.int16, 4: torch.int32}
"""By bytes of an element: integers, which are compared bit for bit."""
CHANGES = torch.uint8
"""The dtype of changes, which no weights have."""


class KeptWeights:
    """The weights of the last hand-over, in host memory; the same at both ends."""

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
