"""What a training rank takes from the options."""

import pytest
import torch

from verl.config import FsdpConfig
from verl.training.fsdp import FsdpOptions


def test_a_rank_is_told_what_waits_on_the_host() -> None:
    """A null is decided once, for all ranks: none may see one."""
    FsdpOptions(torch.float32, held=FsdpConfig(param_offload=False, optimizer_offload=True))
    for left in ({"param_offload": True}, {"optimizer_offload": False}, {"reshard_each": None}):
        with pytest.raises(AssertionError, match="before ranks start"):
            FsdpOptions(torch.float32, held=FsdpConfig(**left))
