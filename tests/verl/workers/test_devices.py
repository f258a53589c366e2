"""What a process computes with."""

from collections.abc import Iterator

import pytest
import torch

from verl.workers.devices import make_deterministic


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave torch as it was."""
    was, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.use_deterministic_algorithms(was, warn_only=warned)


@pytest.mark.parametrize(("device", "warns"), [("cpu", False), ("cuda", True)])
def test_torch_is_told_to_repeat_itself(device: str, warns: bool) -> None:
    """What cannot be repeated is an error on CPU, and said on GPUs, where some have no other."""
    torch.use_deterministic_algorithms(False)
    make_deterministic(torch.device(device))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
