"""Options as dataclass fields that are command-line flags too: one home for a default and its help.

A dataclass says `topk: int = option(3, "documents for a request without topk")`; `add_flags` makes
`--topk` of it and `read_flags` builds the dataclass from what was parsed.
"""

import argparse
import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def option(
    default: Any, help: str, *, at_least: float | None = None, also: tuple[str, ...] = ()
) -> Any:
    """A dataclass field with its help text; numbers below `at_least` are refused.

    `also`: other names of its flag, which users of the original know.
    """
    metadata = {"help": help, "at_least": at_least, "also": also}
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """One flag per field made by `option`; `bool` is a switch, a tuple takes several values."""
    hints = typing.get_type_hints(options)
    group = parser.add_argument_group((options.__doc__ or "").splitlines()[0])
    for field in dataclasses.fields(options):
        if "help" in field.metadata:
            flags = [f"--{name}" for name in (field.name, *field.metadata["also"])]
            group.add_argument(*flags, default=field.default, **_kind(field, hints))


def read_flags(options: type[T], args: argparse.Namespace) -> T:
    """The dataclass with the values that were parsed for its flags."""
    names = [f.name for f in dataclasses.fields(options) if "help" in f.metadata]  # type: ignore[arg-type]
    values = {name: getattr(args, name) for name in names}
    return options(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _kind(field: "dataclasses.Field[Any]", hints: dict[str, Any]) -> dict[str, Any]:
    """What argparse needs to know of a field."""
    hint, help = hints[field.name], field.metadata["help"]
    if hint is bool:
        assert field.default is False, f"{field.name}: a switch is off by default"
        return {"action": "store_true", "help": help}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    several = typing.get_origin(hint) is tuple
    read = typing.get_args(hint)[0] if several else hint
    if field.default not in (None, ()):
        help = f"{help} (default {field.default})"
    kind: dict[str, Any] = {"type": _bounded(read, field.metadata["at_least"]), "help": help}
    return kind | ({"nargs": "+"} if several else {})


def _bounded(read: Any, at_least: float | None) -> Any:
    """A reader of one value that refuses numbers below `at_least`."""
    if at_least is None:
        return read

    def parse(text: str) -> Any:
        value = read(text)
        if not value >= at_least:
            raise argparse.ArgumentTypeError(f"got {text}, expected {at_least:g} or more")
        return value

    parse.__name__ = read.__name__  # argparse names it when `read` fails
    return parse
