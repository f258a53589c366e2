"""A process group on the CPU that treats the loss of a member as NCCL does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from verl.ext.transports.nccl import make_group


class SilentWork:
    """A collective whose `wait` returns at once and never raises.

    It stays incomplete for ever if a member is lost.
    """

    def __init__(self, work: Any, group: SilentGroup) -> None:
        self._work, self._group = work, group

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        is_done = self._work.is_completed() and self._work.exception() is None
        return is_done and not self._group.has_lost_member

    def exception(self) -> None:
        """Return None: an error is only known after it has been waited for in vain."""


class SilentGroup:
    """Gloo's group with NCCL's semantics; `lost_at` is the broadcast before which a member dies."""

    def __init__(self, inner: Any, lost_at: int | None) -> None:
        self._inner, self._lost_at = inner, lost_at
        self.num_broadcasts = self.num_aborts = 0

    @property
    def has_lost_member(self) -> bool:
        return self._lost_at is not None and self.num_broadcasts > self._lost_at

    def broadcast(self, tensor: torch.Tensor, root: int) -> SilentWork:
        self.num_broadcasts += 1
        return SilentWork(self._inner.broadcast(tensor, root), self)

    def abort(self) -> None:
        self.num_aborts += 1


class SilentGroups:
    """A factory of such groups, which remembers them."""

    def __init__(self, lost_at: int | None = None) -> None:
        self.made: list[SilentGroup] = []
        self._lost_at = lost_at

    def __call__(
        self, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> SilentGroup:
        self.made.append(SilentGroup(make_group(store, rank, size, device, timeout), self._lost_at))
        return self.made[-1]
