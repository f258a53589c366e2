"""How an option is declared: its default, its bounds, and what may become of it on resume.

    lr: float = option(1e-6, resume="logged", ge=0)
    \"\"\"Peak learning rate.\"\"\"

The string below the field is its meaning: `--help` and docs/options.md are made of it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.bounds import FINITE, Bounds
from verl.plugins import PYTHON_PREFIX

Resume = Literal["fixed", "experiment", "logged", "free"]
"""What another value than the checkpoint's leads to when a run is resumed:

- fixed: refused, for the saved weights, optimizer state or data position cannot be used otherwise;
- experiment: refused, unless `trainer.resume_anyway` names it: it is what is learned from what;
- logged: taken, with a line in the log;
- free: taken; it says where and how fast to compute, or is compared by content instead.
"""


@dataclass(frozen=True)
class Limits:
    """What a value may be, and its resume class; null is always allowed where the type has it."""

    resume: Resume
    bounds: Bounds = FINITE
    """Those of a number, or of each one in a list or mapping."""
    choices: tuple[str | bool, ...] | str = ()
    """Words, among them true and false, or the place of a registry whose keys they are,
    `module:NAME`, which is imported when a value is checked: the registries of algorithms import
    torch."""
    or_file: bool = False
    """The option takes `path/to/file.py:Name` as well as a word."""

    @property
    def allowed_words(self) -> tuple[str | bool, ...]:
        """The words that may be given; none where any may."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, name = self.choices.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def expected(self, value: Any = 0) -> str:
        """The bounds in words, for one who gave `value`; empty without any."""
        if self.choices:
            words = (str(w).lower() if isinstance(w, bool) else w for w in self.allowed_words)
            return f"one of {', '.join(words)}{', or FILE.py:NAME' if self.or_file else ''}"
        wrong = next((one for one in _parts(value) if not self.allows(one)), 0)
        return self.bounds.expected(wrong)

    def allows(self, value: Any) -> bool:
        """Whether a value that is not null is within the bounds; a list is, if all of it is."""
        if isinstance(value, list | tuple | Mapping):
            return all(self.allows(one) for one in _parts(value))
        if self.choices:
            is_own = self.or_file and (".py:" in value or value.startswith(PYTHON_PREFIX))
            return is_own or value in self.allowed_words
        return not isinstance(value, int | float) or value in self.bounds


def _parts(value: Any) -> Collection[Any]:
    """The values in a list or mapping; any other value alone."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def option(
    default: Any = dataclasses.MISSING,
    *,
    resume: Resume,
    factory: Callable[[], Any] | None = None,
    choices: tuple[str | bool, ...] | str = (),
    or_file: bool = False,
    **bounds: float,
) -> Any:
    """A field of a configuration's dataclass; see `Limits`, and `Bounds` for a number's bounds."""
    metadata = {"limits": Limits(resume, Bounds(**bounds), choices, or_file)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
