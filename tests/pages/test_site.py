"""The site of `make docs`: built without the network, with every page in its navigation."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXTERNAL = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
"""Tags that make a browser fetch from other sites (but for canonical links)."""


def pages(entry: object) -> list[str]:
    """Return the pages below an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_and_in_the_list_of_pages() -> None:
    """Readers can find every page."""
    existing = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(set(listed)) == len(listed)
    required = {page for page in existing if not page.startswith("docs/evidence/")}
    assert required <= set(listed) and all((ROOT / page).exists() for page in listed)
    overview = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [p for p in required - {"docs/README.md"} if f"({p[5:]})" not in overview] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install '.[docs]'")
def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    """No link is broken, the reference has docstrings, and no page loads from other sites."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    reference = (tmp_path / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    assert "Run the training to its end" in reference
    messages = (tmp_path / "docs" / "reference" / "messages.html").read_text(encoding="utf-8")
    assert "expected 0: engines share the ranks" in messages
    names = (tmp_path / "docs" / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "ppo_micro_batch_size_per_gpu" in names
    fetched = {
        tag
        for page in tmp_path.rglob("*.html")
        for tag in EXTERNAL.findall(page.read_text(encoding="utf-8"))
        if 'rel="canonical"' not in tag
    }
    assert fetched == set()
