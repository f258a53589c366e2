"""The checks of a run's options: each is a function beside what it checks, named by its path.

A feature of `verl/ext/` may be absent, and its check with it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator

from verl.config import Config

Check = Callable[[Config], Iterator[str]]
"""Yields an error message for each problem."""
CHECKS = (
    "verl.config.rules:problems",
    "verl.ext.guard:problems",
)


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each problem that a check finds."""
    for path in CHECKS:
        module, _, name = path.partition(":")
        if importlib.util.find_spec(module) is not None:
            check: Check = getattr(importlib.import_module(module), name)
            yield from check(config)
