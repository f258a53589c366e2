"""What a training rank takes from the options."""

import pytest

from verl.config import FsdpConfig
from verl.training.worker import offloading


def test_a_rank_is_told_what_waits_on_the_host() -> None:
    """A null is decided once, for all ranks: none may see one."""
    told = offloading(FsdpConfig(param_offload=False, optimizer_offload=True))
    assert told == {"param_offload": False, "optimizer_offload": True, "reshard_each": True}
    for left in ({"param_offload": True}, {"optimizer_offload": False}, {"reshard_each": None}):
        with pytest.raises(AssertionError, match="before ranks start"):
            offloading(FsdpConfig(**left))
