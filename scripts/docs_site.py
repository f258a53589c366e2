"""A hook of MkDocs (mkdocs.yml): the repository's pages in one folder, as they lie and link here.

MkDocs wants all pages below one folder. README, `docs/` and the pages of other folders are copied
to `build/pages` with the files that they link to, so that every relative link holds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode

from scripts.messages import MARK, table

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "docs/site.css", "example/**/*.md")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Copy the pages, and add the evidence to the navigation."""
    folder = ROOT / "build" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    for source in {*pages, *linked(pages)}:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    listed = folder / "docs" / "messages.md"
    listed.write_text(listed.read_text(encoding="utf-8").replace(MARK, table()), encoding="utf-8")
    config["docs_dir"] = str(folder)
    config["mdx_configs"]["toc"]["slugify"] = slugify_unicode  # anchors of Chinese headings
    config["nav"] = [with_folders(entry) for entry in config["nav"]]
    return config


def linked(pages: list[Path]) -> set[Path]:
    """Files of the repository that a page links to."""
    found = set()
    for page in pages:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                found.add(target)
    return found


def with_folders(entry: Any) -> Any:
    """An entry of the navigation, in which a folder's name stands for its pages."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list):
        return [with_folders(one) for one in entry]
    return {name: folder(place) for name, place in entry.items()}


def folder(place: Any) -> Any:
    """The pages of a folder by name, its README first."""
    if not isinstance(place, str) or place.endswith(".md"):
        return with_folders(place)
    pages = sorted((ROOT / place).glob("*.md"), key=lambda page: (page.stem != "README", page.stem))
    return [str(page.relative_to(ROOT)) for page in pages]
