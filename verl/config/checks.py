"""The checks of a run's options, each beside what it checks.

A feature of `verl/ext/` may be absent, and its check with it.
"""

from collections.abc import Iterator

from verl.config import Config
from verl.plugins import optional

CHECKS = ("verl.config.rules", "verl.ext.guard")
"""Modules with a function `problems(config)`, which yields error messages."""


def problems(config: Config) -> Iterator[str]:
    """Yield an error message for each problem that a check finds."""
    for name in CHECKS:
        module = optional(name)
        if module is not None:
            yield from module.problems(config)
