"""The check of a configuration before any work: each option by its limits, then the rules between.

What needs the machine (files, devices, tools) is in `verl.preflight.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config
from verl.config.known import settings, typed
from verl.errors import ConfigError, explain


def check(config: Config) -> None:
    """Refuse settings that cannot work; the error lists every one found.

    Rules between options see values that are within their limits only.
    """
    _refuse(_beyond_limits(config, registered=False))
    # What follows imports the registries of algorithms, and torch with them, which takes seconds.
    _refuse(_beyond_limits(config, registered=True))
    from verl.config.rules import problems  # noqa: PLC0415

    _refuse(problems(config))


def _refuse(problems: Iterator[str]) -> None:
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def _beyond_limits(config: Config, registered: bool) -> Iterator[str]:
    """Values that their own option does not allow; `registered`: words that a registry holds."""
    for key, _, field, value in settings(config):
        limits = field.metadata["limits"]
        if value is None or isinstance(limits.choices, str) is not registered:
            continue
        if not limits.allows(value):
            usual = field.default_factory() if callable(field.default_factory) else field.default
            expected = limits.expected() + (", or null" if "None" in str(field.type) else "")
            yield explain(key, typed(value), expected, f"{key}={typed(usual)}, the default")
