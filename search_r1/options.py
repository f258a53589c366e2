"""Command lines: one dataclass of options a command, read with tyro.

A field is a flag, in both spellings (`--save-dir`, `--save_dir`); the docstring under it is its
help; `Annotated[int, Bounds(1)]` refuses what is out of bounds. Modules of options import nothing
heavy, so that `--help` and a mistyped flag are answered at once.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from search_r1.plain import escape_controls
from verl.bounds import FINITE, MAX_SEED, Bounds
from verl.errors import explain
from verl.logs import exit_status

__all__ = ["Bounds", "Port", "Seed", "parse", "problems", "run"]

T = TypeVar("T")
Port = Annotated[int, Bounds(0, 65535)]
Seed = Annotated[int, Bounds(0, MAX_SEED)]

STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes,
         tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)  # fmt: skip
"""Nested groups keep plain flags; a switch is off by default and has no `--no-` twin."""
KINDS = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
registry = tyro.constructors.ConstructorRegistry()


@registry.primitive_rule
def _one_value(
    wanted: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """A value, or `… | None`: as tyro reads it, with plainer help and an error in our words."""
    kinds = {get_args(a)[0] if get_origin(a) is Annotated else a for a in get_args(wanted.type)}
    kind: Any = (kinds - {NoneType}).pop() if len(kinds) == 2 and NoneType in kinds else wanted.type
    if kind not in KINDS:
        return None

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError as error:
            raise ValueError(f"got {words[0]!r}, expected {KINDS[kind]}") from error

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind | int),
        str_from_instance=lambda value: [str(value)],
    )


def parse(
    options: Callable[..., T], argv: Sequence[str] | None, *, prog: str, description: str | None
) -> T:
    """The options that a command line gives; wrong ones end with status 2 and a message."""
    given: T = tyro.cli(options, args=argv, prog=prog, description=description, config=STYLE,
                        registry=registry)  # fmt: skip
    for problem in problems(given):
        sys.stderr.write(f"{prog}: {problem}\n")
        sys.exit(2)
    return given


def problems(options: object) -> Iterator[str]:
    """Each number that is out of its bounds: `--topk: got 0, expected 1 or more; fix: …`."""
    hints: Mapping[str, Any] = get_type_hints(type(options), include_extras=True)
    for field in fields(options):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from problems(value)
        values = value if isinstance(value, tuple) else (value,)
        flag = f"--{field.name.replace('_', '-')}"
        for bounds in _bounds(hints[field.name]) or (FINITE,):
            for wrong in (x for x in values if isinstance(x, int | float) and x not in bounds):
                fix = f"give {flag} such a number, or leave it out"
                yield explain(flag, wrong, bounds.expected(wrong), fix)


def _bounds(hint: Any) -> list[Bounds]:
    """The bounds in an annotation, also inside `… | None` and tuples."""
    if isinstance(hint, Bounds):
        return [hint]
    return [one for part in get_args(hint) for one in _bounds(part)]  # of Annotated: type, Bounds


def run(
    work: str,
    options: Any,
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str | None,
) -> int:
    """The exit status of a command line whose work is the function `module:name`.

    Its module is imported after the options were read: those of a dataclass, or of one among
    several that are subcommands (a union). A mistake of the user is told in one message.
    """

    def act() -> int:
        given = parse(options, argv, prog=prog, description=description)
        module, _, name = work.partition(":")
        return int(getattr(importlib.import_module(module), name)(given))

    return exit_status(act, shown=escape_controls)
