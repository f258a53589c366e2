"""The check of a configuration before any work: each option by its limits, then the rules between.

What needs the machine (files, devices, tools) is in `verl.preflight.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.config import Config
from verl.config.known import settings, typed
from verl.errors import ConfigError, explain


def check(config: Config) -> None:
    """Refuse settings that cannot work; the error lists every one found.

    Rules between options see values that are within their limits only.
    """
    refuse(beyond_limits(config))
    # What follows imports the registries of algorithms, and torch with them, which takes seconds.
    refuse(beyond_limits(config, registered=True))
    from verl.config.rules import problems  # noqa: PLC0415

    refuse(problems(config))


def refuse(problems: Iterator[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def beyond_limits(section: Any, registered: bool = False) -> Iterator[str]:
    """Values of a dataclass that their own field does not allow; a field may be without limits.

    With `registered`, only the words that a registry holds are looked at; without, all the rest.
    """
    for key, _, field, value in settings(section):
        if value is None or "limits" not in field.metadata:
            continue
        limits = field.metadata["limits"]
        if isinstance(limits.choices, str) is not registered:
            continue
        if not limits.allows(value):
            usual = field.default_factory() if callable(field.default_factory) else field.default
            expected = limits.expected(value) + (", or null" if "None" in str(field.type) else "")
            yield explain(key, typed(value), expected, f"{key}={typed(usual)}, the default")
