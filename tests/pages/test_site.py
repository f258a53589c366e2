"""The site of `make docs`: whole, without the network, with every page in its navigation."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
AWAY = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
"""What a browser would fetch from elsewhere; the address of a page about a page is not fetched."""


def pages(entry: object) -> list[str]:
    """The pages below an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_and_in_the_list_of_pages() -> None:
    """Whoever adds a page says where a reader meets it."""
    named = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(set(found)) == len(found)
    whole = {page for page in named if not page.startswith("docs/evidence/")}
    assert whole <= set(found) and all((ROOT / page).exists() for page in found)
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page for page in whole - {"docs/README.md"} if f"({page[5:]})" not in listed] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install '.[docs]'")
def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    """No link is broken, the reference has its docstrings, and no page loads from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "docs" / "api.html").read_text(encoding="utf-8")
    assert "Run the training to its end" in reference
    listed = (tmp_path / "docs" / "messages.html").read_text(encoding="utf-8")
    assert "expected 0: engines share the ranks" in listed
    fetched = {
        tag
        for page in tmp_path.rglob("*.html")
        for tag in AWAY.findall(page.read_text(encoding="utf-8"))
        if 'rel="canonical"' not in tag
    }
    assert fetched == set()
