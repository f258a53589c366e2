"""What a process computes with."""

from collections.abc import Iterator

import pytest
import torch

from verl.config import Config
from verl.workers.devices import engine_takes_adapter, make_deterministic


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


@pytest.mark.parametrize(
    ("rank", "device", "merges", "expected"),
    [
        (0, "cpu", None, False), (0, "cuda", False, False),
        (4, "cpu", None, False), (4, "cuda", None, True),
        (4, "cpu", False, True), (4, "cuda", True, False),
    ],
)  # fmt: skip
def test_an_engine_takes_the_adapter_where_that_is_faster(
    rank: int, device: str, merges: bool | None, expected: bool
) -> None:
    """On GPUs by default, on CPU when asked, and never one that is not there."""
    config = Config()
    config.actor_rollout_ref.model.lora_rank = rank
    config.actor_rollout_ref.rollout.merge_adapter = merges
    config.trainer.device = device
    assert engine_takes_adapter(config) is expected
