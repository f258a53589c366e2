"""How idle OpenMP threads wait, in every process that computes; `import verl` sets it.

By default they spin for milliseconds, since a thread that sleeps takes time to wake up. Beside any
other busy process they spin on cores that the working threads need: on two cores, products of
bfloat16 matrices then take three times as long. OpenMP reads the environment when torch is loaded,
so `verl` must be imported before torch.
"""

import os
from collections.abc import Mapping, MutableMapping

SPIN_COUNT = "1000"
"""GOMP_SPINCOUNT of a process with cores of its own: idle threads spin for about 10 µs."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle threads sleep, also in child processes, unless the user has set how they wait."""
    if not any(name in environment for name in PASSIVE):
        environment.update(PASSIVE)


def spin_count(default: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the user's own GOMP_SPINCOUNT, else `default`."""
    own = environment.get("GOMP_SPINCOUNT", SPIN_COUNT)
    return default if own == SPIN_COUNT else own
