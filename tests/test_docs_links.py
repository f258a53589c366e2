"""Links and names of files, modules and commands in the documentation exist."""

import re
from pathlib import Path

import pytest

from search_r1.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "README_zh.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "example").rglob("*.md"),
    ]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
SOURCE = re.compile(r"`((?:verl|search_r1|scripts|benchmarks|tests|example|docs)/[\w./]+)`")
MODULE = re.compile(r"\b(?:verl|search_r1)(?:\.\w+)+")
FIELDS = {f"search_r1.{name}" for name in ("json", "searches", "status", "turns")}
"""A file beside a model, and fields of the server's answers."""
MADE = {"example/index/corpus/bm25"}
"""What a command makes."""


def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_somewhere(name: str) -> None:
    """Linked files exist, and pages have the headings of linked anchors."""
    page = ROOT / name
    broken = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", [name for name in NAMES if "migration" not in name])
def test_source_files_that_are_named_exist(name: str) -> None:
    """Paths in backticks exist; the migration page also names paths of the original."""
    named = set(SOURCE.findall(prose(ROOT / name))) - MADE
    assert [path for path in named if not (ROOT / path).exists()] == []


def is_there(dotted: str) -> bool:
    """Whether a name is a module, or a module and an attribute; packages must define theirs."""
    place, *parts = dotted.split(".")
    folder = ROOT / place
    for part in parts:
        if (folder / f"{part}.py").is_file():
            return True
        if not (folder / part).is_dir():
            return re.search(rf"\b{part}\b", (folder / "__init__.py").read_text()) is not None
        folder /= part
    return True


@pytest.mark.parametrize("name", NAMES)
def test_modules_that_are_named_exist(name: str) -> None:
    """A dotted name is a module, optionally followed by a class, a function or an option."""
    named = MODULE.findall((ROOT / name).read_text(encoding="utf-8"))
    assert [dotted for dotted in named if dotted not in FIELDS and not is_there(dotted)] == []


def test_every_command_has_its_row() -> None:
    """docs/reference/commands.md lists the subcommands of `search-r1`, and no other."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(COMMANDS)
