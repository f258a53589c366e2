"""Options that name code: a built-in row of a registry, or the user's own `path/file.py:Name`.

A run that is started from Python may give objects for such names: they are looked up first, and
travel to the run's other processes with the factories that need them (`Carried`).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from verl.errors import ConfigError, UserError, explain

Row = TypeVar("Row")
Made = TypeVar("Made")
PREFIX = "plugin_"
"""How the modules of the user's files are named."""
GIVEN = "python:"
"""How the name of an object begins that was given from Python and stands in no file."""

_given: dict[str, Any] = {}
"""By absolute name, what stands for that name in this process."""
_own_modules: set[str] = set()
"""Where the code of what was given stands."""
_executing = threading.RLock()
"""Held while a file is executed, whose code may name another one."""


def resolve(option: str, name: str, builtin: Mapping[str, Row]) -> Row:
    """What the value `name` of `option` stands for: a row of `builtin`, or an object of a file.

    *Example*: `resolve("agent.tools", "example/tools/calculator.py:Calculator", TOOLS)` is that
    class. Raises ConfigError for what is not there. An own object's type is for its user to know.
    """
    if name in builtin:
        return builtin[name]
    if absolute(name) in _given:
        given_one: Any = _given[absolute(name)]
        return given_one  # type: ignore[no-any-return]
    if name.startswith(GIVEN):
        fix = "give it from Python again, or put it into a file and name path/file.py:Name"
        raise ConfigError(explain(option, name, "an object that was given to this process", fix))
    if not is_path(name):
        near = difflib.get_close_matches(name, builtin, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "name one of them, or give a file of yours"
        expected = f"one of {', '.join(builtin)}, or path/file.py:Name"
        raise ConfigError(explain(option, repr(name), expected, fix))
    path, _, attribute = name.rpartition(":")
    with _executing:  # no other thread sees a module before it is whole
        module = _module(option, Path(path).expanduser().resolve())
    if not hasattr(module, attribute):
        own = ", ".join(key for key, value in vars(module).items()
                        if getattr(value, "__module__", None) == module.__name__)  # fmt: skip
        expected = f"a name in {path} ({own or 'it defines none'})"
        raise ConfigError(explain(option, repr(attribute), expected, "correct the name"))
    found: Any = getattr(module, attribute)
    return found  # type: ignore[no-any-return]


def build(option: str, name: str, builtin: Mapping[str, Any], config: Any, needs: str) -> Any:
    """What the name stands for, made for `config`; one of the user's must have the part `needs`.

    Raises ConfigError, also for whatever the user's own code raises.
    """
    made = resolve(option, name, builtin)
    if name in builtin:
        return made(config)
    with told(option, name, "what can be called with the options of a run"):
        found = made(config)
    if not hasattr(found, needs):
        expected = f"an object with {needs}"
        raise ConfigError(explain(option, f"{name}, which gives {found!r}", expected, "return one"))
    return found


def is_path(name: str) -> bool:
    """Whether a value names a file's object rather than a built-in."""
    return name.rpartition(":")[0].endswith(".py")


def absolute(name: str) -> str:
    """The value for a process with another working directory."""
    if not is_path(name):
        return name
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{attribute}"


@dataclass(frozen=True)
class Ready:
    """An object that exists already, where a class or function is called with a run's options."""

    made: Any

    def __call__(self, config: Any) -> Any:
        return self.made


@contextlib.contextmanager
def giving(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let options find these objects by their names while the body lasts."""
    before, modules = dict(_given), set(_own_modules)
    _take(objects)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)
        _own_modules.intersection_update(modules)


def given(name: str) -> Any:
    """What was given for a name; None where nothing was."""
    return _given.get(absolute(name))


def _take(objects: Mapping[str, Any]) -> None:
    for name, one in objects.items():
        _given[absolute(name)] = one
        made = one.made if isinstance(one, Ready) else one
        module = getattr(made, "__module__", None) or type(made).__module__
        if not module.startswith(("verl.", "search_r1.")):
            _own_modules.add(module)


@dataclass(frozen=True)
class Carried(Generic[Made]):
    """A factory for other processes, with what was given to this one, as Ray pickles it."""

    make: Callable[[Any], Made]
    objects: Mapping[str, Any] = field(default_factory=lambda: dict(_given))

    def __call__(self, config: Any) -> Made:
        """What it makes there, from the objects that came with it."""
        _take(self.objects)
        return self.make(config)


def _module(option: str, path: Path) -> ModuleType:
    """The file, executed once in a process, whichever options name it."""
    # Every process has the same name for it: what is pickled says by that where its class is.
    name = f"{PREFIX}{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        fix = f"correct the path; relative ones start at {Path.cwd()}"
        raise ConfigError(explain(option, path, "a Python file that exists", fix))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up there
    try:
        with told(option, path, "a file that can be imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def told(
    option: str, what: object, expected: str, kind: type[UserError] = ConfigError,
    fix: str = "correct it, or install what it imports",
) -> Iterator[None]:  # fmt: skip
    """Make whatever a user's own code raises one line, a `kind`, that says where."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{what} ({_words(error)}; line {place.lineno} of {place.filename})"
        raise kind(explain(option, got, expected, fix)) from error


def _words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def blamed(subject: str, kind: type[UserError], expected: str) -> Iterator[None]:
    """Make what a file of the user's raises in the body one line, a `kind`; see `own_place`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = own_place(error)
        if place is None:
            raise
        got = f"{_words(error)} ({place})"
        raise kind(explain(subject, got, expected, "correct it")) from error


def own_place(error: BaseException) -> str | None:
    """The line of a user's file that raised it, itself or in a library that it called.

    None where the fault is ours: no such file was running, or it had called an engine. None also
    for our own exceptions, whoever raised them: they say what to do already.
    """
    if isinstance(error, UserError) or type(error).__module__.startswith("verl."):
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(PREFIX) or module in _own_modules:
            return f"line {line} of {frame.f_code.co_filename}"
        if module.startswith("verl.rollout."):
            break
    return None
