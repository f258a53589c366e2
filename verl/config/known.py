"""Names, types, defaults, descriptions and limits of all options, and the check of a configuration.

Options are described in one place only, the dataclasses of `verl.config`, and read from there by
reflection; `scripts/option_pages.py` prints docs/reference/options.md from them. `check` tests each
option against its limits, then the rules between options (`verl.config.checks`). Checks that need
the machine (files, devices, tools) are in `verl.preflight.checks`.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import Any

from verl.config import Config, correction, engine_kwargs, features, terms
from verl.config.fallen import FALLEN_VALUES
from verl.config.option import Limits
from verl.errors import ConfigError, explain
from verl.plugins import is_path


@dataclass(frozen=True)
class Option:
    """One option: dotted key, type as shown to users, default, description and limits."""

    key: str
    type_name: str
    default: Any
    doc: str
    limits: Limits


@functools.cache
def known_options() -> dict[str, Option]:
    """Return every option of a training run by dotted key, in the order of the dataclasses."""
    return describe_options(Config())


def describe_options(config: Any) -> dict[str, Option]:
    """Return the options of a dataclass with default values, by dotted key."""
    options = {}
    for key, section, field, default in settings(config):
        type_name = _type_name(typing.get_type_hints(type(section))[field.name])
        doc = _field_doc(type(section), field.name)
        options[key] = Option(key, type_name, default, doc, field.metadata["limits"])
    return options


def options_help(options: Iterable[Option]) -> str:
    """List options with default and description for `--help`, in two lines each."""
    lines = [
        f"  {option.key}={to_argument(option.default)}\n      ({option.type_name}) {option.doc}"
        for option in options
    ]
    return "options:\n" + "\n".join(lines)


@functools.cache
def known_sections() -> frozenset[str]:
    """Return the dotted names of all sections of options, such as `actor_rollout_ref.actor`."""
    paths = [key.split(".") for key in known_options()]
    return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any], Any]]:
    """Yield (dotted key, section, field, value) for each option below a section, depth first.

    A list of sections is followed by the options of its items: `reward_model.stages[0].name`.
    """
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{key}.")
            continue
        yield key, section, field, value
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if dataclasses.is_dataclass(item):
                yield from settings(item, f"{key}[{number}].")


def expand_home(section: Any) -> None:
    """Replace a leading `~` by the user's home folder in all text options below a section.

    Neither shells after `key=` nor YAML expand it. References to code (`~/file.py:Name`) stay
    unchanged, because exported models contain them; `verl.plugins` expands them.
    """
    for _, owner, field, value in settings(section):
        if isinstance(value, str):
            setattr(owner, field.name, _expand_home(value))
        elif isinstance(value, list):
            value[:] = [_expand_home(item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, dict):
            texts = {key: item for key, item in value.items() if isinstance(item, str)}
            value |= {key: _expand_home(item) for key, item in texts.items()}


def _expand_home(text: str) -> str:
    return text if is_path(text) else os.path.expanduser(text)


def flatten(
    config: Mapping[str, Any], prefix: str = "", is_whole: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf; a mapping is one if empty or `is_whole(name)`."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not is_whole(name):
            yield from flatten(value, f"{name}.", is_whole)
        else:
            yield name, value


def to_argument(value: Any) -> str:
    """Format a value as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _type_name(hint: Any) -> str:
    """Format a type for users: `int | null` for `int | None`, `any` for Any."""
    if hint is Any:
        return "any"
    text = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    return text.replace("None", "null").replace("typing.", "")


def _field_doc(kind: type, name: str) -> str:
    """Return the docstring of a field, from its class or the base class that declares it."""
    bases = (base for base in kind.__mro__ if dataclasses.is_dataclass(base))
    docs = (_field_docs(base.__module__).get((base.__name__, name)) for base in bases)
    return next(filter(None, docs), "")


@functools.cache
def _field_docs(module: str) -> dict[tuple[str, str], str]:
    """Read the strings below fields from the source of a module, by class and field."""
    docs = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for pair in itertools.pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(text)):
                    docs[node.name, name] = " ".join(str(text).split())
    return docs


def check(config: Config) -> None:
    """Raise ConfigError for settings that cannot work, with every problem found.

    The rules between options run only if each option is within its own limits.
    """
    # First, because the other checks import torch, which takes seconds.
    raise_problems(features.problems(config))
    engine_kwargs.check(config.actor_rollout_ref.rollout.engine_kwargs)
    check_limits(config)
    raise_problems(correction.problems(config.actor_rollout_ref.actor.rollout_correction))
    actor = config.actor_rollout_ref.actor
    raise_problems(terms.problems(actor.terms))
    raise_problems(terms.teacher_problems(actor.terms, actor.teacher))
    from verl.config.checks import problems  # noqa: PLC0415

    raise_problems(problems(config))


def check_limits(section: Any) -> None:
    """Raise ConfigError for options of `section` that are beyond their own limits."""
    raise_problems(limit_problems(section))
    # Imports the registries of algorithms, and with them torch, which takes seconds.
    raise_problems(limit_problems(section, registered=True))


def raise_problems(problems: Iterator[str]) -> None:
    """Raise ConfigError with one line per problem, if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def limit_problems(section: Any, registered: bool = False) -> Iterator[str]:
    """Yield an error message for each option of `section` whose value is beyond its limits.

    `registered` selects the options whose allowed words come from a registry; the default checks
    all others. Null and fields without limits are skipped.
    """
    for key, _, field, value in settings(section):
        if value is None or "limits" not in field.metadata:
            continue
        limits = field.metadata["limits"]
        if isinstance(limits.choices, str) is not registered:
            continue
        if not limits.allows(value):
            default = field.default_factory() if callable(field.default_factory) else field.default
            expected = limits.expected(value) + (", or null" if "None" in str(field.type) else "")
            advice = FALLEN_VALUES.get((key, value)) if isinstance(value, str) else None
            fix = advice or f"{key}={to_argument(default)}, the default"
            yield explain(key, to_argument(value), expected, fix)
