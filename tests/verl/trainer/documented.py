"""Compares metric names with the list in docs/reference/metrics.md."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the `names` that are in no table of the page, where a word in capitals matches any."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]
    patterns = [re.sub(r"[A-Z]+", "[^/]+", name) for name in listed]
    return [name for name in names if not any(re.fullmatch(p, name) for p in patterns)]
