"""Texts as token ids in batches of about equal length, so that little padding is computed."""

from collections.abc import Iterator, Sequence

import torch


def by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Positions of `lengths` in batches, longest first: the first batch needs the most memory."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def padded(
    rows: Sequence[Sequence[int]], padding: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (batch, longest) filled up on the right with `padding`, and the mask of real tokens."""
    width = max(len(row) for row in rows)
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return torch.tensor(filled).to(device), mask.to(device)
