"""Options of a training rank, and what other ranks do when one fails."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config import FsdpConfig
from verl.errors import ResourceError
from verl.training import worker
from verl.training.fsdp import FsdpOptions
from verl.training.worker import TrainerWorker


def test_offloading_options_are_resolved_before_ranks_start() -> None:
    """A null is resolved once for all ranks, which must not see it."""
    FsdpOptions(torch.float32, fsdp=FsdpConfig(param_offload=False, optimizer_offload=True))
    for options in ({"param_offload": True}, {"optimizer_offload": False}, {"reshard_each": None}):
        with pytest.raises(AssertionError, match="before ranks start"):
            FsdpOptions(torch.float32, fsdp=FsdpConfig(**options))


def test_a_rank_that_cannot_write_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are gathered together: it takes part to the end, and raises then."""
    rank, events = object.__new__(TrainerWorker), list[str]()

    def gather(*_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            yield name, torch.zeros(1)
            events.append(name)

    def fail(directory: Path, named: Iterator[Any], *_: Any) -> float:
        next(named)
        raise OSError(28, "No space left on device", str(directory))

    rank.actor = SimpleNamespace(model=SimpleNamespace(policy_weights=gather))
    rank.model_config = None
    monkeypatch.setattr(worker, "write_weights", fail)
    monkeypatch.setattr(worker.dist, "barrier", lambda: events.append("barrier"))
    with pytest.raises(ResourceError, match=r"No space left.*free some space"):
        rank.write_policy(tmp_path, "float32", False, writer=0, num_writers=1)
    assert events == ["a", "b", "c", "barrier"]
