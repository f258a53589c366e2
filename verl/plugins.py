"""Options that name code: a built-in registry entry, or the user's own `path/file.py:Name`.

A run that is started from Python may register objects under such names. They are looked up first,
and travel to the run's other processes with the factories that need them (`PortableFactory`).
"""

import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from verl.errors import ConfigError, UserError, did_you_mean, explain
from verl.user_files import MODULE_PREFIX, execute_file, import_lock, module_name

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")
Product = TypeVar("Product")
PYTHON_PREFIX = "python:"
"""Name prefix of objects passed in from Python, which have no file."""

_registered: dict[str, Any] = {}
"""Objects registered in this process, by absolute name."""
_user_modules: set[str] = set()
"""Names of the modules that define the registered objects."""


def resolve(option: str, name: str, builtin: Mapping[str, Entry]) -> Entry:
    """Return the object that an option names: an entry of `builtin`, registered, or in a file.

    *Example*: `resolve("agent.tools", "example/tools/calculator.py:Calculator", TOOLS)` returns
    that class. Types are not checked. Raises ConfigError if there is no such object.
    """
    if name in builtin:
        return builtin[name]
    if absolute(name) in _registered:
        return cast(Entry, _registered[absolute(name)])
    if name.startswith(PYTHON_PREFIX):
        fix = "pass it in from Python again, or put it into a file and name path/file.py:Name"
        raise ConfigError(explain(option, name, "an object registered in this process", fix))
    if not is_path(name):
        fix = did_you_mean(name, builtin, "name one of them, or give a file of yours")
        expected = f"one of {', '.join(builtin)}, or path/file.py:Name"
        raise ConfigError(explain(option, repr(name), expected, fix))
    path, _, attribute = name.rpartition(":")
    with import_lock:  # no other thread may see a partly executed module
        module = _import_file(option, Path(path).expanduser().absolute())
    if not hasattr(module, attribute):
        own = ", ".join(key for key, value in vars(module).items()
                        if getattr(value, "__module__", None) == module.__name__)  # fmt: skip
        expected = f"a name in {path} ({own or 'it defines none'})"
        raise ConfigError(explain(option, repr(attribute), expected, "correct the name"))
    return cast(Entry, getattr(module, attribute))


def load(option: str, name: str, builtin: Mapping[str, str]) -> Any:
    """Return what an option names, where built-in entries are paths, `module:Name`.

    Raises ConfigError as `resolve`, and for a built-in entry whose file was deleted.
    """
    target: Any = resolve(option, name, builtin)
    if not isinstance(target, str):
        return target
    try:
        return imported(target)
    except ModuleNotFoundError as error:
        file = (error.name or "").replace(".", "/")
        if not file.startswith("verl/ext/"):
            raise
        got, fix = f"{name}, which needs {file}, which was deleted", "restore it, or name another"
        raise ConfigError(explain(option, got, "a value without it", fix)) from error


def build(option: str, name: str, builtin: Mapping[str, Any], config: Any, needs: str) -> Any:
    """Call the object that an option names with `config`, and return the result.

    Raises ConfigError for any exception of user code, or a result without attribute `needs`.
    """
    factory = resolve(option, name, builtin)
    if name in builtin:
        return factory(config)
    with user_code_errors(option, name, "a class or function that takes the options of a run"):
        product = factory(config)
    if not hasattr(product, needs):
        expected = f"an object with {needs}"
        got = f"{name}, which gives {product!r}"
        raise ConfigError(explain(option, got, expected, "return one"))
    return product


def imported(path: str) -> Any:
    """Import an object of the product by its path, `module:Name`, where it is needed."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def required(option: str, name: str, path: str) -> Any:
    """Import what an option's value `name` needs: a module, or `module:Name`.

    Raises ConfigError if it, or a package that it imports, is missing.
    """
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        got = f"{name}, which needs {error.name}, which is missing"
        fix = "restore it, or pip install it"
        raise ConfigError(explain(option, got, "a value without it", fix)) from error
    return getattr(found, attribute) if attribute else found


def optional(module: str) -> ModuleType | None:
    """Import a module of a feature; None, with a warning, if it or what it imports was deleted.

    A folder of which only compiled files are left counts as deleted: it has no file.
    """
    deleted = module
    try:
        found = importlib.import_module(module)
        if found.__file__ is not None:
            return found
    except ModuleNotFoundError as error:
        deleted = error.name or ""
        if not deleted.startswith(".".join(module.split(".")[:2])):
            raise
    logger.warning("%s was deleted: the run goes on without %s", deleted, module)
    return None


def is_path(name: str) -> bool:
    """Whether a name refers to an object in a file (`path/file.py:Name`), not to a built-in."""
    return name.rpartition(":")[0].endswith(".py")


def absolute(name: str) -> str:
    """Return the name with its path made absolute, for processes in another working directory.

    Before the path may stand what kind of thing it names: `kind:path/file.py:Name`.
    """
    if not is_path(name):
        return name
    kind, _, rest = name.partition(":")
    if kind.isidentifier() and is_path(rest):
        return f"{kind}:{absolute(rest)}"
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{attribute}"


@dataclass(frozen=True)
class FixedInstance:
    """A factory that always returns one existing object, whatever the options."""

    instance: Any

    def __call__(self, config: Any) -> Any:
        return self.instance


@contextlib.contextmanager
def registered(objects: Mapping[str, Any]) -> Iterator[None]:
    """Register objects under the names that options use for them, within the body."""
    objects_before, modules_before = dict(_registered), set(_user_modules)
    _register(objects)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(objects_before)
        _user_modules.intersection_update(modules_before)


def registered_object(name: str) -> Any:
    """Return the object that is registered under a name, or None."""
    return _registered.get(absolute(name))


def _register(objects: Mapping[str, Any]) -> None:
    for name, entry in objects.items():
        _registered[absolute(name)] = entry
        target = entry.instance if isinstance(entry, FixedInstance) else entry
        module = getattr(target, "__module__", None) or type(target).__module__
        if not module.startswith(("verl.", "search_r1.")):
            _user_modules.add(module)


@dataclass(frozen=True)
class PortableFactory(Generic[Product]):
    """A picklable factory that takes the objects registered in this process along to another."""

    factory: Callable[[Any], Product]
    objects: Mapping[str, Any] = field(default_factory=lambda: dict(_registered))

    def __call__(self, config: Any) -> Product:
        """Register the objects in this process, then call the factory."""
        _register(self.objects)
        return self.factory(config)


def _import_file(option: str, path: Path) -> ModuleType:
    """Import a file; it is executed once per process, however many options name it."""
    name = module_name(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        fix = f"correct the path; relative ones start at {Path.cwd()}"
        raise ConfigError(explain(option, path, "a Python file that exists", fix))
    with user_code_errors(option, path, "a file that can be imported"):
        return execute_file(path.resolve(), name)


@contextlib.contextmanager
def user_code_errors(
    option: str, source: object, expected: str, kind: type[UserError] = ConfigError,
    fix: str = "correct it, or install what it imports",
) -> Iterator[None]:  # fmt: skip
    """Turn exceptions of the user's code in the body, but no UserError, into a one-line `kind`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{source} ({_one_line(error)}; line {frame.lineno} of {frame.filename})"
        raise kind(explain(option, got, expected, fix)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def user_file_errors(subject: str, kind: type[UserError], expected: str) -> Iterator[None]:
    """Turn exceptions of the body into a one-line `kind` if `user_code_location` finds a line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        location = user_code_location(error)
        if location is None:
            raise
        got = f"{_one_line(error)} ({location})"
        raise kind(explain(subject, got, expected, "correct it")) from error


def user_code_location(error: BaseException) -> str | None:
    """Return the line of a user's file that raised the error, directly or in a library it called.

    Returns None if the fault is ours: no user's file is in the traceback, or it had called a
    rollout engine. Returns None for our own exceptions too, since they already say what to do.
    """
    if isinstance(error, UserError) or type(error).__module__.startswith("verl."):
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(MODULE_PREFIX) or module in _user_modules:
            return f"line {line} of {frame.f_code.co_filename}"
        if module.startswith("verl.rollout."):
            break
    return None


def to_outcome(value: Any) -> bool | None:
    """Return the outcome that a user's reward gives: right, wrong, or None for unknown.

    0 and 1 count, also those of NumPy and torch. Raises ValueError for other values.
    """
    if value is None:
        return None
    if value not in (0, 1):
        raise ValueError(f"is_right: got {value!r}, expected True, False, or None for unknown")
    return bool(value)
