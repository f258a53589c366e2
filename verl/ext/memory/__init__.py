"""Estimates how much memory a run needs in each phase, and checks that this machine has it.

`trial` measures a forward and backward pass on meta tensors, `needs` lists what ranks and engines
hold, `estimate` sums it up, `check` compares it with the machine and decides what is offloaded.
"""

from collections.abc import Sequence

from verl.config import Config
from verl.errors import UserError


def planned(config: Config) -> tuple[Config, Sequence[UserError]]:
    """Return the options with every null decided, and why the run cannot fit this machine."""
    from verl.ext.memory.check import (  # noqa: PLC0415 - imports torch
        decide_memory,
        memory_problems,
        read_setting,
    )

    setting = read_setting(config)
    config = decide_memory(config, setting)
    return config, list(memory_problems(config, setting))
