"""A MkDocs hook (mkdocs.yml) that collects the repository's pages in one folder.

MkDocs needs all pages below one folder. README, `docs/` and pages of other folders are copied to
`build/pages` at the same relative paths, with the files they link to, so that links stay valid.
"""

import re
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode

from scripts import messages, option_pages

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/site.css",
    "example/**/*.md",
    "search_r1/retrieval/service/logo.svg",
)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Copy the pages, insert tables of messages and names, and expand folders in the navigation."""
    folder = ROOT / "build" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    for source in {*pages, *linked(pages)}:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    fill(folder / "docs" / "reference" / "messages.md", messages.MARK, messages.table())
    fill(
        folder / "docs" / "reference" / "configuration.md", option_pages.MARK, option_pages.names()
    )
    config["docs_dir"] = str(folder)
    config["mdx_configs"]["toc"]["slugify"] = slugify_unicode  # anchors of Chinese headings
    config["nav"] = [expand_folders(entry) for entry in config["nav"]]
    return config


def fill(page: Path, mark: str, table: str) -> None:
    """Replace a page's mark by its table."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace(mark, table), encoding="utf-8")


def linked(pages: list[Path]) -> set[Path]:
    """Return the files of the repository to which the pages link."""
    targets = set()
    for page in pages:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                targets.add(target)
    return targets


def expand_folders(entry: Any) -> Any:
    """Return a navigation entry in which names of folders are replaced by their pages."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list):
        return [expand_folders(item) for item in entry]
    return {name: pages_of(target) for name, target in entry.items()}


def pages_of(target: Any) -> Any:
    """Return the pages of a folder by name, README first; expand other navigation targets."""
    if not isinstance(target, str) or target.endswith(".md"):
        return expand_folders(target)
    pages = (ROOT / target).glob("*.md")
    ordered = sorted(pages, key=lambda page: (page.stem != "README", page.stem))
    return [str(page.relative_to(ROOT)) for page in ordered]
