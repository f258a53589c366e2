"""Extraction of a page's readable text (the article of an HTML page), in any charset.

A parser can take minutes and gigabytes for untrusted HTML, so this runs in separate processes,
which `pages` starts and kills: `python -m search_r1.online.extraction DESCRIPTOR`.
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
from search_r1.retrieval.schema import well_formed

MAX_MEMORY = 512 << 20
"""Limit of the address space in bytes; the libraries take about 70 MB of it."""
META_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
META_BYTES = 2048
"""Number of bytes in which a `<meta charset>` is searched."""
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
LATIN1_LABELS = ("iso-8859-1", "iso8859-1", "latin-1", "latin1", "ascii", "us-ascii")
"""Charset labels that browsers treat as Windows-1252, a superset of these charsets."""
PARSE_ERRORS = (ValueError, ArithmeticError, TypeError, AttributeError, LookupError, AssertionError,
                RecursionError, MemoryError, etree.Error)  # fmt: skip


def extract(page: Page) -> str:
    """Return the text of a page, one paragraph a line; raises PageError if there is none."""
    text: str | None = decode(page)
    if page.media_type == "text/html":
        try:
            text = trafilatura.extract(text, include_comments=False, include_tables=True)
        except PARSE_ERRORS as error:
            raise PageError(f"its HTML cannot be read ({type(error).__name__}: {error})") from error
    lines = (" ".join(line.split()) for line in (text or "").splitlines())
    text = "\n".join(line for line in lines if line)
    if not text:
        raise PageError("it has no text")
    return text


def extract_title(page: Page) -> str:
    """Return the title of an HTML page on one line, or an empty string if there is none."""
    if page.media_type != "text/html":
        return ""
    try:
        metadata = trafilatura.extract_metadata(decode(page))
    except PARSE_ERRORS:  # the text may be readable nevertheless
        return ""
    return " ".join((getattr(metadata, "title", None) or "").split())


def decode(page: Page) -> str:
    """Decode by byte order mark, declared charset, UTF-8 or Windows-1252, as browsers do."""
    for mark, charset in BYTE_ORDER_MARKS.items():
        if page.body.startswith(mark):
            return page.body.decode(charset, "replace")
    meta = META_CHARSET.search(page.body[:META_BYTES])
    for declared in (page.charset, meta[1].decode() if meta else None, "utf-8"):
        text = _decode_as(page.body, declared) if declared else None
        if text is not None:
            return text
    return page.body.decode("cp1252", "replace")


def _decode_as(body: bytes, charset: str) -> str | None:
    """Decode `body`, without a truncated last character; returns None for the wrong charset."""
    name = "cp1252" if charset.lower() in LATIN1_LABELS else charset
    try:
        b"ab".decode(name, "ignore")  # raises LookupError for codecs such as zlib
        text = codecs.getincrementaldecoder(name)().decode(body)
    except (LookupError, ValueError):
        return None
    return well_formed(text)


def main() -> None:
    """Extract pages received over the descriptor until it is closed or memory is exhausted."""
    # trafilatura logs errors for pages without text.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"")  # ready: the start does not count as the time of a page
    with contextlib.suppress(EOFError, MemoryError):
        while True:
            page, with_title, seconds = connection.recv()
            signal.alarm(math.ceil(seconds) + 1)  # exit even if the parent was killed
            # JSON, since the parent must not unpickle data from a process with an untrusted page.
            try:
                title = extract_title(page) if with_title else ""
                answer = {"text": extract(page), "title": title}
            except PageError as error:
                answer = {"error": str(error)}
            connection.send_bytes(json.dumps(answer).encode())
            signal.alarm(0)


if __name__ == "__main__":
    main()
