"""What the configuration's dataclasses say about themselves: names, types, defaults, docstrings.

Read from `verl.config` by reflection, so that an option is described in one place only. Nothing
here parses a command line. `python -m verl.config.known` prints docs/options.md.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl.config
from verl.config import Config


@dataclass(frozen=True)
class Option:
    """One option: its dotted key, its type for people, its default and its sentence."""

    key: str
    type_name: str
    default: Any
    doc: str


@functools.cache
def known_options() -> dict[str, Option]:
    """Every option by dotted key, in the order of the dataclasses."""
    return {option.key: option for option in _walk(Config(), "")}


@functools.cache
def known_sections() -> frozenset[str]:
    """Dotted names of the sections (`actor_rollout_ref.actor`), which hold options."""
    parts = [key.split(".") for key in known_options()]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def _walk(section: Any, prefix: str) -> Iterator[Option]:
    """The options below a section instance, depth first."""
    hints = typing.get_type_hints(type(section))
    classes = (kind.__name__ for kind in reversed(type(section).__mro__))
    docs = {key: doc for name in classes for key, doc in _field_docs().get(name, {}).items()}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
        else:
            hint = _type_name(hints[field.name])
            yield Option(f"{prefix}{field.name}", hint, value, docs.get(field.name, ""))


def _type_name(hint: Any) -> str:
    """A type as a user would write it: `int | null` for `int | None`, `any` for Any."""
    if hint is Any:
        return "any"
    text = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
    return text.replace("None", "null").replace("typing.", "")


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


PAGE_HEAD = """# Every option

Printed by `python -m verl.config.known` from the dataclasses of `verl/config/`.
[configuration.md](configuration.md) says how they are given. `???` has no default.
"""


def page() -> str:
    """All options as Markdown, a table a section."""
    sections: dict[str, list[Option]] = {}
    for option in known_options().values():
        sections.setdefault(option.key.rpartition(".")[0], []).append(option)
    parts = [PAGE_HEAD]
    for section, options in sections.items():
        parts.append(f"## {f'`{section}`' if section else 'The dialogue'}\n")
        rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
        rows += [_row(option) for option in options]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    words = {None: "null", True: "true", False: "false"}
    is_word = option.default is None or isinstance(option.default, bool)
    default = words[option.default] if is_word else option.default
    cells = f"`{option.key.rpartition('.')[2]}`", option.type_name, f"`{default}`", option.doc
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
