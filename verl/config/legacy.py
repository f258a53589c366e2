"""Names that the scripts and YAML files of the original and veRL use, and what each becomes here.

An option means the same under another name (`ALIASES`), has no effect any more and says so once, or
is refused with what to give instead (`LEGACY`). The names themselves are in `legacy.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FILE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
ALIASES: Mapping[str, str] = _FILE["aliases"]
"""Other names of our options and sections."""


@dataclass(frozen=True)
class Legacy:
    """An option without effect; `silent` are the values that ask for nothing else than we do."""

    names: str
    """Several for one advice; `{a,b}` stands for each of them. A name covers all below it."""
    advice: str
    silent: tuple[Any, ...]
    is_refused: bool
    """Any other value fails instead of warning: without it the run would not be the one meant."""


def expand(names: str) -> Iterator[str]:
    """The dotted names that a row's names stand for.

    *Example*: `"x.{a,b} y"` gives `x.a`, `x.b` and `y`.
    """
    for name in names.split():
        found = re.search(r"\{(.*?)\}", name)
        if found is None:
            yield name
            continue
        for part in found[1].split(","):
            yield from expand(name.replace(found[0], part, 1))


ROWS = [
    Legacy(row["names"], row["advice"], (*row.get("silent", ()), None), is_refused="refused" in row)
    for row in _FILE["without_effect"]
]
LEGACY: Mapping[str, Legacy] = {name: row for row in ROWS for name in expand(row.names)}
"""What has no effect here, by dotted name; some are still options of `verl.config`."""


def name_here(given: str) -> str:
    """Our name of an option that was given under another one."""
    for other, ours in ALIASES.items():
        if given == other or given.startswith(f"{other}."):
            return ours + given.removeprefix(other)
    return given


def find(key: str) -> Legacy | None:
    """What is known of an option without effect, or of a section that it stands in."""
    while key and key not in LEGACY:
        key = key.rpartition(".")[0]
    return LEGACY.get(key)
