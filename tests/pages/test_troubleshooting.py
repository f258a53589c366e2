"""Every message that docs/guides/troubleshooting.md quotes exists in the sources."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
SOURCES = ("verl", "search_r1", "scripts")
FOREIGN_MESSAGES = {
    "CUDA out of memory",
    "No module named …",
    "Watchdog caught collective operation timeout",
}
"""Messages of Python, torch and NCCL."""
SEPARATORS = re.compile(r": got |, expected |; fix: ?")
"""Texts between the parts of a message by `verl.errors.explain`."""


@cache
def source_texts() -> str:
    """Return all strings of the sources, one per line; `…` replaces inserted values."""
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
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    return "\n".join(" ".join(text.split()) for text in [*texts, metrics])


def quotes() -> list[str]:
    """Return the code in the first columns of the page's tables."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [quote for cell in rows for quote in re.findall(r"`([^`]+)`", cell)]


def is_in_sources(quote: str) -> bool:
    """Whether each part of the quoted message is in one line of the sources' texts."""
    for part in filter(str.strip, SEPARATORS.split(quote)):
        pieces = [re.escape(piece.strip()) for piece in part.split("…") if piece.strip()]
        if not re.search(".*".join(pieces), source_texts()):
            return False
    return True


@pytest.mark.parametrize("quote", [quote for quote in quotes() if quote not in FOREIGN_MESSAGES])
def test_a_quoted_message_exists(quote: str) -> None:
    """A message that is changed in the code is changed on the page too."""
    assert is_in_sources(quote)


def test_an_invented_message_does_not_exist() -> None:
    """The search does not accept every text."""
    assert not is_in_sources("unknown option: got …, expected a key of nowhere")
