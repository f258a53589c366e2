"""Command-line parsing: each command's options are a dataclass, read with tyro.

Each field is a flag in both spellings (`--save-dir`, `--save_dir`), and the docstring below the
field is its help text. `Annotated[int, Bounds(1)]` refuses values out of bounds. Modules that
define options import nothing heavy, so that `--help` and errors in flags appear at once. A command
with many flags names the common ones in its dataclass as `COMMON`: `--help` shows those alone.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from search_r1.plain import escape_controls
from search_r1.variables import warn_of_near_misses
from verl.bounds import FINITE, MAX_SEED, Bounds
from verl.errors import ConfigError, explain
from verl.logs import exit_status

__all__ = ["Bounds", "Port", "Seed", "parse", "problems", "run"]

T = TypeVar("T")
Port = Annotated[int, Bounds(0, 65535)]
Seed = Annotated[int, Bounds(0, MAX_SEED)]

STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes,
         tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)  # fmt: skip
"""Flags of nested groups have no prefix; a boolean flag is off by default, without `--no-`."""
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
HELP_ALL = "--help-all"
registry = tyro.constructors.ConstructorRegistry()


@registry.primitive_rule
def _parse_single_value(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse `X` and `X | None` as tyro does, but with simpler help and our form of errors."""
    types = {get_args(a)[0] if get_origin(a) is Annotated else a for a in get_args(info.type)}
    is_optional = len(types) == 2 and NoneType in types
    value_type: Any = (types - {NoneType}).pop() if is_optional else info.type
    if value_type not in TYPE_NAMES:
        return None

    def read(words: list[str]) -> Any:
        try:
            return value_type(words[0])
        except ValueError as error:
            raise ValueError(f"got {words[0]!r}, expected {TYPE_NAMES[value_type]}") from error

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=value_type.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, value_type | int),
        str_from_instance=lambda value: [str(value)],
    )


def parse(
    options: Callable[..., T], argv: Sequence[str] | None, *, prog: str, description: str | None
) -> T:
    """Return the options of a command line; exits with status 2 and a message if it is invalid."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = words[: words.index("--")] if "--" in words else words
    if HELP_ALL in asked:
        words = ["--help"]
    elif hasattr(options, "COMMON") and {"-h", "--help"} & {*asked}:
        note = f"{HELP_ALL} lists all flags; these are the common ones."
        description = f"{(description or '').strip()}\n\n{note}"
        options = _abridged(options)
    parsed: T = tyro.cli(options, args=words, prog=prog, description=description, config=STYLE,
                         registry=registry)  # fmt: skip
    for problem in problems(parsed):
        sys.stderr.write(f"{prog}: {problem}\n")
        sys.exit(2)
    return parsed


def _abridged(options: Any, common: Collection[str] = ()) -> Any:
    """Return the dataclass with only its `COMMON` flags in the help, those of groups included."""
    common = common or options.COMMON
    hints = get_type_hints(options, include_extras=True)
    changed: list[Any] = []
    for field in fields(options):
        hint, default = hints[field.name], field
        if is_dataclass(hint):
            hint = _abridged(hint, common)
            default = dataclasses.field(default_factory=hint)
        elif field.name not in common:
            hint = Annotated[hint, tyro.conf.Suppress]
        else:
            continue
        changed.append((field.name, hint, default))
    return make_dataclass(options.__name__, changed, bases=(options,), frozen=True, kw_only=True)


def problems(options: object) -> Iterator[str]:
    """Describe each number out of bounds: `--topk: got 0, expected 1 or more; fix: …`."""
    hints: Mapping[str, Any] = get_type_hints(type(options), include_extras=True)
    for field in fields(options):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from problems(value)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [number for number in values if isinstance(number, int | float)]
        flag = f"--{field.name.replace('_', '-')}"
        for bounds in _bounds(hints[field.name]) or (FINITE,):
            for number in numbers:
                if number not in bounds:
                    fix = f"give {flag} such a number, or leave it out"
                    yield explain(flag, number, bounds.expected(number), fix)


def _bounds(hint: Any) -> list[Bounds]:
    """Return the bounds in a type annotation, also those inside `… | None` and tuples."""
    if isinstance(hint, Bounds):
        return [hint]
    return [bounds for part in get_args(hint) for bounds in _bounds(part)]


def run(
    target: str,
    options: Any,
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str | None,
    fallen: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Parse the options, call the function `target` with them and return its exit status.

    `target` is `module:name`; the module is imported after parsing. `options` is a dataclass, or a
    union of dataclasses, which are subcommands. A user's mistake is reported in one message.
    `fallen`: flags that no longer exist, each with what it was and what to use.
    """

    def act() -> int:
        warn_of_near_misses()
        for word in sys.argv[1:] if argv is None else argv:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in fallen:
                raise ConfigError(explain(flag, "a flag that fell", "its absence", fallen[flag]))
        parsed = parse(options, argv, prog=prog, description=description)
        module, _, name = target.partition(":")
        return int(getattr(importlib.import_module(module), name)(parsed))

    return exit_status(act, shown=escape_controls)
