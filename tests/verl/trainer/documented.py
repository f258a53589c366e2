"""The metrics that docs/metrics.md lists."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names` that are in no table of the page; a word in capitals stands for any name."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)]
    patterns = [re.sub(r"[A-Z]+", "[^/]+", name) for name in listed]
    return [name for name in names if not any(re.fullmatch(p, name) for p in patterns)]
