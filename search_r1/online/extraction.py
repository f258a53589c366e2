"""The readable text of a page: article text out of HTML, in any charset.

Strangers write HTML on which a parser takes minutes and gigabytes, so this runs in processes of its
own, which `pages` starts and ends: `python -m search_r1.online.extraction DESCRIPTOR`.
"""

import codecs
import contextlib
import json
import logging
import math
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection

import trafilatura
from lxml import etree

from search_r1.online.fetch import Page, PageError
from search_r1.search.schema import well_formed

MOST_MEMORY = 512 << 20
"""Bytes of address space, of which the libraries take about 70 MB."""
DECLARED = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
DECLARED_WITHIN = 2048
MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
LATIN = ("iso-8859-1", "iso8859-1", "latin-1", "latin1", "ascii", "us-ascii")
"""Labels that browsers read as Windows-1252, which has all of their characters."""
BROKEN = (ValueError, ArithmeticError, TypeError, AttributeError, LookupError, AssertionError,
          RecursionError, MemoryError, etree.Error)  # fmt: skip


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


def _decoded(body: bytes, charset: str) -> str | None:
    """None for another charset than this page's; a last character that was cut off is left out."""
    name = "cp1252" if charset.lower() in LATIN else charset
    try:
        b"ab".decode(name, "ignore")  # refuses codecs that are not of text, such as zlib
        text = codecs.getincrementaldecoder(name)().decode(body)
    except (LookupError, ValueError):
        return None
    return well_formed(text)


def main() -> None:
    """Answer pages that come over the descriptor until nobody sends any, or memory is out."""
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is no error
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"")  # ready: the time to start is no page's
    with contextlib.suppress(EOFError, MemoryError):
        while True:
            page, with_title, seconds = connection.recv()
            signal.alarm(math.ceil(seconds) + 1)  # ends this process should its starter be killed
            # as JSON: the starter must not unpickle what was near a stranger's page
            try:
                title = extract_title(page) if with_title else ""
                answer = {"text": extract(page), "title": title}
            except PageError as error:
                answer = {"error": str(error)}
            connection.send_bytes(json.dumps(answer).encode())
            signal.alarm(0)


if __name__ == "__main__":
    main()
