"""What a training rank takes from the options, and what becomes of the others where it fails."""

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


def test_a_rank_is_told_what_waits_on_the_host() -> None:
    """A null is decided once, for all ranks: none may see one."""
    FsdpOptions(torch.float32, fsdp=FsdpConfig(param_offload=False, optimizer_offload=True))
    for left in ({"param_offload": True}, {"optimizer_offload": False}, {"reshard_each": None}):
        with pytest.raises(AssertionError, match="before ranks start"):
            FsdpOptions(torch.float32, fsdp=FsdpConfig(**left))


def test_a_rank_that_cannot_write_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are gathered together: it takes part to the end, and then says what went wrong."""
    rank, done = object.__new__(TrainerWorker), list[str]()
    rank.actor, rank.model_config = SimpleNamespace(model=None), None

    def gathered(*_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            yield name, torch.zeros(1)
            done.append(name)

    def fail(directory: Path, named: Iterator[Any], *_: Any) -> float:
        next(named)
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(worker, "policy_weights", gathered)
    monkeypatch.setattr(worker, "write_weights", fail)
    monkeypatch.setattr(worker.dist, "barrier", lambda: done.append("met"))
    with pytest.raises(ResourceError, match=r"No space left.*free some space"):
        rank._write_policy(tmp_path, "float32", False, writer=0, num_writers=1)
    assert done == ["a", "b", "c", "met"]
