"""Measured figures on the pages are those of the evidence.

The convention: a paragraph, list item or table that reports a measurement links to the page of
`docs/evidence` from which its figures are; a table may have the link in the paragraph above it.
In such a paragraph, figures that are settings are written as code.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if EVIDENCE not in p.parents),
    EVIDENCE / "benchmarks.md",
]
LINK = re.compile(r"\]\(([\w./]+\.md)[^)]*\)")
NUMBER = r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)"
MEASURED = re.compile(
    rf"{NUMBER} ?(?:ms\b|queries/s|tokens/s|times as (?:fast|long|many|much)|GFLOPS)|"
    r"(?<!\d)(\d+\.\d+)×(?! ?\d)"
)
"""Figures in forms that only measurements have here, but for `SETTINGS`."""
SETTINGS = {"3 ms"}
UNITS = r"m?s|seconds|minutes|queries/s|tokens/s|×(?! ?\d)|times|%|[KMGT]i?B|GFLOPS|nats"
FIGURE = re.compile(rf"{NUMBER} ?(?:{UNITS})(?!\w)|(?<![\w.,])(0\.\d{{3}})(?![\w.])")
"""Figures with a unit, and scores of three decimals."""


def blocks(text: str) -> list[str]:
    """Return paragraphs and list items; a table belongs to the paragraph above it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\n\n(?=\|)", "\n", text)
    parts = re.split(r"\n\n|\n(?=(?:- |\d\. ))", text)
    return [re.sub(r"`[^`]*`", "", part) for part in parts]


def missing(block: str, folder: Path) -> list[str]:
    """Return a block's figures that are not on the pages of evidence to which it links."""
    targets = {(folder / link).resolve() for link in LINK.findall(block)}
    linked = [page for page in targets if page.parent == EVIDENCE]
    if not linked:
        return [m[0] for m in MEASURED.finditer(block) if m[0] not in SETTINGS]
    known = "\n".join(page.read_text(encoding="utf-8") for page in linked).replace(",", "")
    digits = ((m[1] or m[2]).replace(",", "") for m in FIGURE.finditer(block))
    return [d for d in digits if not re.search(rf"(?<![\d.]){re.escape(d)}(?!\d|\.\d)", known)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_stand_in_the_evidence(page: Path) -> None:
    """A measured figure has a link to the evidence, where the same digits stand."""
    found = {part: missing(part, page.parent) for part in blocks(page.read_text(encoding="utf-8"))}
    assert {block: lacking for block, lacking in found.items() if lacking} == {}


def test_a_wrong_figure_is_found() -> None:
    """Invented figures, and figures without a link, are reported."""
    figure = "It took 123456 s ([figures](demo.md))."
    assert missing(figure, EVIDENCE) == ["123456"]
    assert missing("It answers 512 queries/s.", ROOT) == ["512 queries/s"]
    assert missing("A request may take 60 s.", ROOT) == []
