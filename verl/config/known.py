"""What the configuration says about itself: names, types, defaults, meaning and limits of options.

Read from `verl.config` by reflection, so that an option is described in one place only;
`scripts/option_pages.py` prints docs/options.md from it. `check` holds a configuration against its
limits, and then against the rules between options (`verl.config.rules`), before any work; what
needs the machine (files, devices, tools) is in `verl.preflight.checks`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config import Config
from verl.config.option import Limits
from verl.errors import ConfigError, explain
from verl.plugins import is_path


@dataclass(frozen=True)
class Option:
    """One option: its dotted key, its type for people, its default, its sentence, its limits."""

    key: str
    type_name: str
    default: Any
    doc: str
    limits: Limits


@functools.cache
def known_options() -> dict[str, Option]:
    """Every option by dotted key, in the order of the dataclasses."""
    found = {}
    for key, section, field, default in settings(Config()):
        hint = _type_name(typing.get_type_hints(type(section))[field.name])
        limits = field.metadata["limits"]
        found[key] = Option(key, hint, default, _field_doc(type(section), field.name), limits)
    return found


@functools.cache
def known_sections() -> frozenset[str]:
    """Dotted names of the sections (`actor_rollout_ref.actor`), which hold options."""
    parts = [key.split(".") for key in known_options()]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def settings(
    section: Any, prefix: str = ""
) -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """(dotted key, section, field, value) of all options below a section, depth first.

    Where the value is a list of sections, theirs follow: `reward_model.stages[0].name`.
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
    """Put the user's home for the `~` that values below a section begin with: they are paths.

    No shell does so after `key=`, nor in a YAML file. Names of code stay as typed, since they go
    into exported models; `verl.plugins` reads them so.
    """
    for _, owner, field, value in settings(section):
        if isinstance(value, str):
            setattr(owner, field.name, _expand_home(value))
        elif isinstance(value, list):
            value[:] = [_expand_home(x) if isinstance(x, str) else x for x in value]


def _expand_home(text: str) -> str:
    return text if is_path(text) else os.path.expanduser(text)


def flatten(
    config: Mapping[str, Any], prefix: str = "", is_whole: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by their dotted names; a mapping that `is_whole` is one."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not is_whole(name):
            yield from flatten(value, f"{name}.", is_whole)
        else:
            yield name, value


def to_argument(value: Any) -> str:
    """A value as one would type it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _type_name(hint: Any) -> str:
    """A type as a user would write it: `int | null` for `int | None`, `any` for Any."""
    if hint is Any:
        return "any"
    text = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    return text.replace("None", "null").replace("typing.", "")


def _field_doc(kind: type, name: str) -> str:
    """The string that follows a field in the source of its class, or of a class above it."""
    docs = (_field_docs().get((above.__name__, name)) for above in kind.__mro__)
    return next(filter(None, docs), "")


@functools.cache
def _field_docs() -> dict[tuple[str, str], str]:
    """The string that follows each field in the source, by class and field."""
    found = {}
    trees = [ast.parse(file.read_text("utf-8")) for file in Path(__file__).parent.glob("*.py")]
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for pair in itertools.pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(text)):
                    found[node.name, name] = " ".join(str(text).split())
    return found


def check(config: Config) -> None:
    """Refuse settings that cannot work; the error lists every one found.

    Rules between options see values that are within their limits only.
    """
    raise_problems(limit_problems(config))
    # What follows imports the registries of algorithms, and torch with them, which takes seconds.
    raise_problems(limit_problems(config, registered=True))
    from verl.config.rules import problems  # noqa: PLC0415

    raise_problems(problems(config))


def raise_problems(problems: Iterator[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def limit_problems(section: Any, registered: bool = False) -> Iterator[str]:
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
            yield explain(
                key, to_argument(value), expected, f"{key}={to_argument(usual)}, the default"
            )
