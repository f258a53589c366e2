"""Prints the documentation of the options from the code that defines them.

`python -m scripts.option_pages options` prints docs/reference/options.md, `… names` the tables that
the site has in docs/reference/configuration.md.
"""

import sys

from verl.config.known import Option, known_options, to_argument
from verl.config.overrides import ALIASES, LEGACY_OPTIONS

MARK = "<!-- names -->"
"""Placeholder in docs/reference/configuration.md that the site replaces with the tables."""
OPTIONS_HEAD = """# Every option

Printed by `python -m scripts.option_pages options` from the dataclasses in `verl/config/`: name,
default (`???`: none), type and bounds, what another value does when a run is resumed ([long
runs](../guides/long_runs.md)), and meaning. [Configuration](configuration.md) explains how to set
options.
"""


def options() -> str:
    """Return all options as Markdown, with a list per section."""
    sections: dict[str, list[Option]] = {}
    described: dict[tuple[str, str], Option] = {}
    for option in known_options().values():
        sections.setdefault(option.key.rpartition(".")[0], []).append(option)
    parts = [OPTIONS_HEAD]
    for section, members in sections.items():
        parts.append(f"## {f'`{section}`' if section else 'The dialogue'}\n")
        lines = []
        for option in members:
            name = option.key.rpartition(".")[2]
            first = described.setdefault((name, option.doc), option)
            doc = option.doc if first is option else f"As `{first.key}`."
            lines.append(_line(name, option, doc))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(name: str, option: Option, doc: str) -> str:
    bounds = "" if option.limits.choices else option.limits.expected()
    kind = ", ".join(part for part in (option.type_name, bounds) if part)
    default = to_argument(option.default)
    return f"- **`{name}`** `{default}` ({kind}; {option.limits.resume}): {doc}"


def names() -> str:
    """Return tables of Search-R1's and veRL's option names: translated, ignored, refused."""
    parts = ["| Given | Means |", "|---|---|"]
    parts += [f"| `{given}` | `{ours}` |" for given, ours in ALIASES.items()]
    for title, is_refused in (
        ("The following have no effect; if they request something, a warning says so once:", False),
        ("The following are refused unless they request what is done anyway:", True),
    ):
        parts += ["", title, "", "| Option | Instead |", "|---|---|"]
        for row in LEGACY_OPTIONS:
            if row.is_refused is is_refused:
                cell = ", ".join(f"`{name}`" for name in row.names.split())
                parts.append(f"| {cell} | {row.advice} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    pages = {"options": options, "names": names}
    if len(sys.argv) != 2 or sys.argv[1] not in pages:
        raise SystemExit(f"usage: python -m scripts.option_pages {'|'.join(pages)}")
    sys.stdout.write(pages[sys.argv[1]]())
