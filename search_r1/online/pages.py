"""The readable text of a page: article text out of HTML, in any charset."""

import codecs
import logging
import re
from dataclasses import dataclass

import trafilatura
from lxml import etree

from search_r1.online.addresses import AddressPolicy
from search_r1.online.cache import Cache
from search_r1.online.fetch import Page, PageError, PageFetcher
from search_r1.search.schema import well_formed

logger = logging.getLogger(__name__)
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is no error

DECLARED = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
DECLARED_WITHIN = 2048
MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
LATIN = ("iso-8859-1", "iso8859-1", "latin-1", "latin1", "ascii", "us-ascii")
"""Labels that browsers read as Windows-1252, which has all of their characters."""
BROKEN = (ValueError, TypeError, AttributeError, LookupError, RecursionError, etree.Error)


@dataclass(frozen=True)
class Article:
    """What can be read on a page."""

    title: str
    """Empty where the page has none."""
    text: str


def visit(
    url: str,
    policy: AddressPolicy | None = None,
    *,
    most_bytes: int = 2_000_000,
    timeout: float = 15.0,
) -> Article:
    """Title and text of the page at `url`; raises PageError, which says why there is none.

    Blocks for up to `timeout` s. Only public addresses are fetched from, unless `policy` allows
    others; at most `most_bytes` are read.
    """
    fetcher = PageFetcher(policy or AddressPolicy(), most_bytes, timeout)
    try:
        page = fetcher.fetch(url)
    finally:
        fetcher.close()
    return Article(extract_title(page), extract(page))


class PageReader:
    """Texts of pages, from the cache where they are kept."""

    def __init__(self, fetcher: PageFetcher, cache: Cache, scope: str, most_chars: int) -> None:
        """`scope` tells the cache's pages apart by how they were read."""
        self._fetcher = fetcher
        self._cache = cache
        self._scope = scope
        self._most_chars = most_chars

    def text(self, url: str) -> str | None:
        """The first characters of the page's text, cut at a word; None if it cannot be read."""
        text = self._cache.page(self._scope, url)
        if text is None:
            try:
                text = extract(self._fetcher.fetch(url))
            except PageError as error:
                logger.info("no text of page %r: %s", url, error)
                return None
            self._cache.keep_page(self._scope, url, text)
        return cut(text, self._most_chars)

    def close(self) -> None:
        """Close the connections."""
        self._fetcher.close()


def extract(page: Page) -> str:
    """The text of a page, paragraphs on lines of their own; raises PageError if there is none."""
    text: str | None = decode(page)
    if page.media_type == "text/html":
        try:
            text = trafilatura.extract(text, include_comments=False, include_tables=True)
        except BROKEN as error:
            raise PageError(f"its HTML cannot be read ({type(error).__name__}: {error})") from error
    lines = (" ".join(line.split()) for line in (text or "").splitlines())
    text = "\n".join(line for line in lines if line)
    if not text:
        raise PageError("it has no text")
    return text


def extract_title(page: Page) -> str:
    """The title of an HTML page on one line; empty for other pages and where there is none."""
    if page.media_type != "text/html":
        return ""
    try:
        found = trafilatura.extract_metadata(decode(page))
    except BROKEN:  # the text may be readable all the same
        return ""
    return " ".join((getattr(found, "title", None) or "").split())


def decode(page: Page) -> str:
    """By byte order mark, declared charset, UTF-8, or else Windows-1252, as browsers do."""
    for mark, charset in MARKS:
        if page.body.startswith(mark):
            return page.body.decode(charset, "replace")
    in_page = DECLARED.search(page.body[:DECLARED_WITHIN])
    for declared in (page.charset, in_page[1].decode() if in_page else None, "utf-8"):
        decoded = _decoded(page.body, declared) if declared else None
        if decoded is not None:
            return decoded
    return page.body.decode("cp1252", "replace")


def cut(text: str, most_chars: int) -> str:
    """`text` cut at a space or a line's end."""
    if len(text) <= most_chars:
        return text
    head = text[:most_chars]
    return head.rstrip() if text[most_chars].isspace() else re.sub(r"\s+\S*\Z", "", head) or head


def _decoded(body: bytes, charset: str) -> str | None:
    """None for a charset that is unknown, not one of text, or not this page's.

    A last character that was cut off with the page is left out.
    """
    name = "cp1252" if charset.lower() in LATIN else charset
    try:
        b"ab".decode(name, "ignore")  # refuses codecs that are not of text, such as zlib
        text = codecs.getincrementaldecoder(name)().decode(body)
    except (LookupError, UnicodeError):
        return None
    return well_formed(text)
