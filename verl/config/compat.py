"""Intentional differences from earlier systems, switched back one by one for comparison.

`compat=search_r1` sets all that restore the original Search-R1; a single switch given after it
wins. docs/algorithms.md says what each one brings back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from verl.config.option import option


@dataclass
class CompatConfig:
    """Behaviour of the original that was changed here; all false leaves this project's own."""

    gae_over_all_tokens: bool = option(False, resume="experiment")
    """GAE steps over observation tokens too, and the critic is trained on them."""
    whiten_over_all_tokens: bool = option(False, resume="experiment")
    """Mean and variance of GAE's advantages are over observation tokens too."""
    sampled_validation: bool = option(False, resume="experiment")
    """Validation samples as training does (rollout.temperature, rollout.top_p)."""


COMPAT_PRESETS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"none": frozenset(), "search_r1": frozenset(field.name for field in fields(CompatConfig))}
)
"""What `compat=NAME` switches on; it switches the others off."""
