"""Options of a training rank."""

import pytest
import torch

from verl.config import FsdpConfig
from verl.training.fsdp import FsdpOptions


def test_offloading_options_are_resolved_before_ranks_start() -> None:
    """A null is resolved once for all ranks, which must not see it."""
    FsdpOptions(torch.float32, fsdp=FsdpConfig(param_offload=False, optimizer_offload=True))
    for options in ({"param_offload": True}, {"optimizer_offload": False}, {"reshard_each": None}):
        with pytest.raises(AssertionError, match="before ranks start"):
            FsdpOptions(torch.float32, fsdp=FsdpConfig(**options))
