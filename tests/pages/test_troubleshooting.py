"""docs/troubleshooting.md quotes messages: each is said somewhere in the sources."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("verl", "search_r1", "scripts")
OTHERS = {"CUDA out of memory", "No module named …", "Watchdog caught collective operation timeout"}
"""Messages of Python, torch and NCCL."""
JOINTS = re.compile(r": got |, expected |; fix: ?")
"""Between the parts that `verl.errors.explain` puts together."""


@cache
def said() -> str:
    """Every text of the sources, a line each; what is filled in is a `…`."""
    texts = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
        texts += [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.sh")]
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return "\n".join(" ".join(text.split()) for text in [*texts, metrics])


def quotes() -> list[str]:
    """What stands in the first column of the page's tables as code."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [quote for cell in rows for quote in re.findall(r"`([^`]+)`", cell)]


def is_said(quote: str) -> bool:
    """Whether each part of the quote is in a text of the sources, in its order."""
    for part in filter(str.strip, JOINTS.split(quote)):
        pieces = [re.escape(piece.strip()) for piece in part.split("…") if piece.strip()]
        if not re.search(".*".join(pieces), said()):
            return False
    return True


@pytest.mark.parametrize("quote", [quote for quote in quotes() if quote not in OTHERS])
def test_a_quoted_message_is_one_of_ours(quote: str) -> None:
    """A message that was reworded in the code is reworded on the page."""
    assert is_said(quote)


def test_a_message_that_nobody_says_is_found_out() -> None:
    """The search is not so kind that it finds anything."""
    assert not is_said("unknown option: got …, expected a key of nowhere")
