"""The licence of every installed package, as its metadata tells it: `make licences`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

ATTRIBUTIONS = Path(__file__).resolve().parent.parent / "ATTRIBUTIONS.md"
UNKNOWN = "not told"
LONGEST = 60
"""Characters; some packages put the whole text of their licence into the field."""


def licence_of(package: Distribution) -> str:
    """The SPDX expression, else the classifiers, else the first line of the free text."""
    metadata = package.metadata
    expression = metadata["License-Expression"]
    if expression:
        return str(expression)
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    lines = (metadata["License"] or "").strip().splitlines()
    return " / ".join(classifiers) or (lines[0].strip()[:LONGEST] if lines else UNKNOWN)


def table(packages: Iterable[Distribution]) -> str:
    """`package version licence`, a line each, by name."""
    rows = {(p.metadata["Name"].lower(), p.version, licence_of(p)) for p in packages}
    return "".join(f"{name:40} {version:20} {licence}\n" for name, version, licence in sorted(rows))


if __name__ == "__main__":
    sys.stdout.write(table(distributions()) + "\n" + ATTRIBUTIONS.read_text(encoding="utf-8"))
