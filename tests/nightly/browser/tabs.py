"""Tabs of a real headless Chromium, for tests of pages."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright import sync_api as playwright

TIMEOUT_MS = 15_000


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield this machine's Chromium; without one the tests fail, as the `browser` marker says."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Visit:
    """A browser tab and the errors that the browser reported in it."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab, self.url, self.complaints = tab, url, list[str]()
        tab.set_default_timeout(TIMEOUT_MS)
        tab.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.add_init_script("window.boom = () => { document.title = 'boom'; }")

    def open(self, address: str = "") -> None:
        self.tab.goto("about:blank")
        self.tab.goto(self.url + address)
        self.tab.wait_for_selector("#state:not([data-state=waiting])")

    def see(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until the element shows the text."""
        place = self.tab.locator(selector).first
        playwright.expect(place).to_contain_text(text, timeout=TIMEOUT_MS)

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.tab.locator(selector).all_text_contents()]
