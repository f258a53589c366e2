"""What the configuration's dataclasses say about themselves: names, types, defaults, meaning.

Read from `verl.config` by reflection, so that an option is described in one place only. Nothing
here parses a command line; `scripts/option_pages.py` prints docs/options.md from it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl.config
from verl.config import Config
from verl.config.option import Limits


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
        found[key] = Option(key, hint, default, _meaning(type(section), field.name), limits)
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


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by their dotted names."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def typed(value: Any) -> str:
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


def _meaning(kind: type, name: str) -> str:
    """The string that follows a field in the source of its class, or of a class above it."""
    docs = (_field_docs().get(above.__name__, {}).get(name) for above in kind.__mro__)
    return next(filter(None, docs), "")


@functools.cache
def _field_docs() -> dict[str, dict[str, str]]:
    """The string that follows each field in the source, by class and field."""
    folder = Path(verl.config.__file__).parent
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in folder.glob("*.py"))
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_docs_of(node)) for node in classes}


def _docs_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(field, sentence) for each annotated field that a bare string follows."""
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield statement.target.id, " ".join(str(after.value.value).split())
