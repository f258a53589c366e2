"""All pages in all looks: light, dark, on a phone and in Chinese.

The pictures stay in pytest's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.nightly.browser import screens
from tests.nightly.browser.screens import LOOKS, Pages
from tests.nightly.browser.tabs import chromium

pytestmark = pytest.mark.browser
PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"
FITS = "document.documentElement.scrollWidth <= innerWidth"
IN_ONE_LINE = (
    "document.querySelector('#language').offsetTop < document.querySelector('h1').offsetHeight"
)
UNCUT = "(e) => e.scrollWidth <= e.clientWidth"
SEEN = "(e) => [e.getBoundingClientRect()].every((b) => b.top >= 0 && b.bottom <= innerHeight)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The three pages on real ports."""
    with screens.served(tmp_path_factory.mktemp("served")) as pages:
        yield pages


@pytest.mark.parametrize("look", LOOKS)
def test_each_page_fits_its_screen(pages: Pages, tmp_path: Path, look: str) -> None:
    """Nothing is cut off or in error; what a reader needs first is on the first screen."""
    first = {
        "retriever-first": "#examples button, #go", "retriever": ".passage.shared .why >> nth=0",
        "chat-first": "#examples button, #ask, #language", "chat-working": ".working, #ask, #stop",
        "chat": ".answer, #ask", "view-curves": "figure >> nth=0", "view-list": "tbody tr >> nth=0",
        "view-dialogue": "h2.question",
    }  # fmt: skip
    with chromium() as browser:
        for name, tab in screens.photographs(browser, pages, look):
            tab.screenshot(path=tmp_path / f"{name}.png")
            assert tab.evaluate(FITS), name
            parts = tab.locator(first.pop(name)).all()
            assert parts and all(part.evaluate(SEEN) for part in parts), name
            assert tab.locator("h1 img[src='logo.svg']").count() == 1
            assert tab.evaluate(IN_ONE_LINE), name
            is_chinese = tab.evaluate("document.documentElement.lang") == "zh"
            assert is_chinese == (look == "chinese")
            if name == "chat-working":
                told = "正在思考 …" if is_chinese else "Thinking …"
                assert tab.locator(".working").inner_text().startswith(told)
            if name == "view-list":
                assert tab.locator(".scroll").evaluate(UNCUT)
                is_folded = tab.locator(".more-filters[open]").count() == 0
                assert is_folded == (look == "phone")
    assert not first


def test_the_pictures_of_the_docs_are_of_these_pages() -> None:
    """`python -m tests.nightly.browser.screens docs/pictures` makes them."""
    pictures = {path.stem: Image.open(path).size for path in PICTURES.glob("*.png")}
    assert pictures == dict.fromkeys(screens.DOCS, tuple(screens.DESK.values()))
