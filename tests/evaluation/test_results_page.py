"""The paper's figures in docs/evidence/results.md are consistent."""

import re
from pathlib import Path

from search_r1.evaluation.published import EXACT_MATCH

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "results.md"
MISPRINTED = {("Qwen2.5-7B", "IRCoT")}
"""Rows whose printed average in the paper differs from the average of the row."""


def rows() -> dict[tuple[str, str], list[float]]:
    """Read the page's figures by model and method."""
    figures: dict[tuple[str, str], list[float]] = {}
    model = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("### "):
            model = line.removeprefix("### ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and re.fullmatch(r"0\.\d{3}", cells[1]):
            figures[model, cells[0]] = [float(cell) for cell in cells[1:]]
    return figures


def test_averages_are_those_of_their_rows() -> None:
    """Every row's average is correct, except for the paper's known misprint."""
    table = rows()
    assert len(table) == 22
    wrong = {name for name, (*sets, mean) in table.items() if abs(sum(sets) / 7 - mean) > 0.00051}
    assert wrong == MISPRINTED


def test_the_code_has_the_pages_figures() -> None:
    """`search-r1 evaluate table --paper` prints the page's figures."""
    named = {(f"Qwen2.5-{size}", name): list(row)
             for size, table in EXACT_MATCH.items() for name, row in table.items()}  # fmt: skip
    assert named == rows()
