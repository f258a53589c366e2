"""Prints the licence of every installed package from its metadata: `make licences`."""

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

ATTRIBUTIONS = Path(__file__).resolve().parent.parent / "ATTRIBUTIONS.md"
UNKNOWN = "unknown"
MAX_LENGTH = 60
"""Maximum characters; some packages put the whole licence text into the field."""


def licence_of(package: Distribution) -> str:
    """Return the SPDX expression, else the classifiers, else the first line of the free text."""
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
    return " / ".join(classifiers) or (lines[0].strip()[:MAX_LENGTH] if lines else UNKNOWN)


def table(packages: Iterable[Distribution]) -> str:
    """Return a line `package version licence` per package, sorted by name."""
    rows = {(p.metadata["Name"].lower(), p.version, licence_of(p)) for p in packages}
    return "".join(f"{name:40} {version:20} {licence}\n" for name, version, licence in sorted(rows))


if __name__ == "__main__":
    sys.stdout.write(table(distributions()) + "\n" + ATTRIBUTIONS.read_text(encoding="utf-8"))
