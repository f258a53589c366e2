"""Every message for users that the sources hold, as rows of a table: `python -m scripts.messages`.

Read from the code without running it: calls of `explain(subject, got, expected, fix)`, rows of the
rules between options, and texts of raised errors that say what was expected.
What is filled in at run time is a `…`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("verl", "search_r1")
MARK = "<!-- messages -->"
"""In docs/messages.md: where the site has the table."""
Texts = Mapping[str, str]
"""What names stand for."""


def rows() -> list[tuple[str, str]]:
    """Each message with its module, by module and place; equal ones of a module once."""
    found: dict[tuple[str, str], None] = {}
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for message in messages(tree):
            found[" ".join(message.split()), str(path.relative_to(ROOT))] = None
    return list(found)


def messages(tree: ast.Module) -> Iterator[str]:
    """The messages of a module."""
    known = names_in(tree.body)
    places = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in places:
        own = {**known, **names_in(ast.walk(function))}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "explain":
                yield explained([text_of(part, own) for part in node.args])
            elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                parts = [text_of(part, own) for part in node.value.elts]
                if len(parts) == 5:
                    yield explained(parts[1:])
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = text_of(node.exc.args[0], own) if node.exc.args else ""
                if "expected " in text and "; " in text:
                    yield text


def explained(parts: list[str]) -> str:
    """The wording of `verl.errors.explain`."""
    subject, got, expected, fix = (*parts, "…", "…", "…", "…")[:4]
    return f"{subject}: got {got}, expected {expected}; fix: {fix}"


def names_in(nodes: Iterable[ast.AST]) -> Texts:
    """Texts that are assigned to names; of several for one name the first."""
    found: dict[str, str] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, part in pairs:
            if isinstance(name, ast.Name):
                found.setdefault(name.id, text_of(part, found))
    return found


def text_of(node: ast.expr, known: Texts) -> str:
    """A text as far as the code says it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known)
    if isinstance(node, ast.Name):
        return known.get(node.id, "…")
    if isinstance(node, ast.IfExp):
        return text_of(node.body, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known) + text_of(node.right, known)
    return "…"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| message | module |", "| --- | --- |"]
    for message, module in rows():
        shown = message.replace("`", "'").replace("|", "/")
        lines.append(f"| `{shown}` | `{module}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
