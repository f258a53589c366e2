"""Declaration of options: default, bounds, and whether a resumed run may change the value.

    lr: float = option(1e-6, resume="logged", ge=0)
    \"\"\"Peak learning rate.\"\"\"

The string below the field describes the option in `--help` and docs/reference/options.md.
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl.bounds import FINITE, Bounds
from verl.plugins import PYTHON_PREFIX

Resume = Literal["fixed", "experiment", "logged", "free"]
"""Resume class of an option: what happens if its value differs from the resumed checkpoint's.

- fixed: refused, because the saved weights, optimizer state or data position would not fit;
- experiment: refused unless `trainer.resume_anyway` names it, because it defines the experiment;
- logged: accepted, with a line in the log;
- free: accepted; it affects only where and how fast to compute, or is compared by content instead.
"""


PathKind = Literal["code", "model", "file", "template", "checkpoint"]
"""What an option locates: `file.py:Name`, a model (or a name of the hub), a file or folder, a
template (or the name of one), a checkpoint (or disable or auto)."""


@dataclass(frozen=True)
class Limits:
    """Allowed values of an option, its resume class, and whether it names something in a file.

    Null is allowed where the type has it.
    """

    resume: Resume
    bounds: Bounds = FINITE
    """Bounds of a number, or of each number in a list or mapping."""
    choices: tuple[str | bool, ...] | str = ()
    """The allowed words or booleans, or a registry `module:NAME` whose keys they are. A registry is
    imported only when a value is checked, because those of algorithms import torch."""
    or_file: bool = False
    """Whether `path/to/file.py:Name` is allowed as well."""
    path: PathKind | None = None
    """What the value locates, so that processes with another working directory find it."""

    @property
    def allowed_words(self) -> tuple[str | bool, ...]:
        """The allowed words, read from the registry if there is one; empty if there are none."""
        if isinstance(self.choices, tuple):
            return self.choices
        module, _, name = self.choices.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def expected(self, value: Any = 0) -> str:
        """Describe the allowed values for the error about `value`; empty if there are no limits."""
        if self.choices:
            words = (str(w).lower() if isinstance(w, bool) else w for w in self.allowed_words)
            return f"one of {', '.join(words)}{', or FILE.py:NAME' if self.or_file else ''}"
        wrong = next((item for item in _items(value) if not self.allows(item)), 0)
        return self.bounds.expected(wrong)

    def allows(self, value: Any) -> bool:
        """Whether a value other than null is allowed; a list or mapping, if all its values are."""
        if isinstance(value, list | tuple | Mapping):
            return all(self.allows(item) for item in _items(value))
        if self.choices:
            is_custom = self.or_file and (".py:" in value or value.startswith(PYTHON_PREFIX))
            return is_custom or any(_is_word(value, word) for word in self.allowed_words)
        return not isinstance(value, int | float) or value in self.bounds


def _is_word(value: Any, word: str | bool) -> bool:
    """Whether a value is an allowed word; one such as `kind:URL` allows each value `kind:…`."""
    kind, colon, _ = str(word).partition(":")
    return bool(value == word) or bool(colon and str(value).startswith(kind + colon))


def _items(value: Any) -> Collection[Any]:
    """Return the values of a list or mapping, or the value itself in a tuple."""
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
    path: PathKind | None = None,
    **bounds: float,
) -> Any:
    """Return a dataclass field; see `Limits` for the arguments, and `Bounds` for `bounds`."""
    path = "code" if or_file else path
    metadata = {"limits": Limits(resume, Bounds(**bounds), choices, or_file, path)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
