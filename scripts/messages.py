"""Prints a table of all error messages for users in the sources: `python -m scripts.messages`.

The messages are read from the code without running it: calls of `explain(subject, got, expected,
fix)`, rows of the rules between options, and texts of raised errors that state what was expected.
Parts that are only known at run time appear as `…`.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("verl", "search_r1")
MARK = "<!-- messages -->"
"""Placeholder in docs/reference/messages.md that the site replaces with the table."""
Texts = Mapping[str, str]
"""Texts by the names of the variables that hold them."""


def rows() -> list[tuple[str, str]]:
    """Return (message, module) pairs in source order, each pair once."""
    unique: dict[tuple[str, str], None] = {}
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for message in messages(tree):
            unique[" ".join(message.split()), str(path.relative_to(ROOT))] = None
    return list(unique)


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the messages of a module."""
    module_texts = assigned_texts(tree.body)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        texts = {**module_texts, **assigned_texts(ast.walk(function))}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "explain":
                yield explained([text_of(part, texts) for part in node.args])
            elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                parts = [text_of(part, texts) for part in node.value.elts]
                if len(parts) == 5:
                    yield explained(parts[1:])
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = text_of(node.exc.args[0], texts) if node.exc.args else ""
                if "expected " in text and "; " in text:
                    yield text


def explained(parts: list[str]) -> str:
    """Return the message that `verl.errors.explain` makes of its arguments."""
    subject, got, expected, fix = (*parts, "…", "…", "…", "…")[:4]
    return f"{subject}: got {got}, expected {expected}; fix: {fix}"


def assigned_texts(nodes: Iterable[ast.AST]) -> Texts:
    """Return the texts assigned to variables; for a variable with several, the first."""
    texts: dict[str, str] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, part in pairs:
            if isinstance(name, ast.Name):
                texts.setdefault(name.id, text_of(part, texts))
    return texts


def text_of(node: ast.expr, known: Texts) -> str:
    """Return the text of an expression, with `…` for what is only known at run time."""
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
    """Return the rows as a Markdown table."""
    lines = ["| message | module |", "| --- | --- |"]
    for message, module in rows():
        shown = message.replace("`", "'").replace("|", "/")
        lines.append(f"| `{shown}` | `{module}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
