"""Reads documents of one text each: plain text, Markdown, HTML and PDF."""

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from search_r1.retrieval.errors import install_command
from verl.errors import first_line

_HEADING = re.compile(r"\s*#{1,6}\s+(?P<title>\S.*)")
_META_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)
META_BYTES = 2048
"""Number of bytes in which a `<meta charset>` is looked for."""
_SPLIT_WORD = re.compile(r"(?<=[^\W\d_])-\n(?=[a-zà-ÿ])")
"""A word that the end of a printed line divides."""
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
           RecursionError, MemoryError, OSError)  # fmt: skip
"""What parsers raise for broken files, beside errors of their own."""


class Content(NamedTuple):
    """The title of a document, "" if it has none of its own, and its text."""

    title: str
    text: str


class Unreadable(Exception):
    """A document cannot be read: got, expected, fix."""

    def __init__(self, got: object, expected: str, fix: str) -> None:
        super().__init__(str(got), expected, fix)
        self.parts = (str(got), expected, fix)


def read_document(suffix: str, data: bytes) -> Content:
    """Return title and text of a document. Raises Unreadable."""
    title, text = READERS[suffix](data)
    if not text.strip():
        fix = (
            "drop the file" if suffix != ".pdf" else "read it with ocrmypdf first, if it is a scan"
        )
        raise Unreadable("no text", "a document with words", fix)
    return Content(" ".join(title.split()), text)


def _plain(data: bytes) -> Content:
    return Content("", decode(data))


def _markdown(data: bytes) -> Content:
    """Return a text whose title is its first line, if that is a heading."""
    text = decode(data)
    if (heading := _HEADING.match(text)) is None:
        return Content("", text)
    return Content(_without_closing(heading["title"]), text[heading.end() :])


def _html(data: bytes) -> Content:
    """Return the article of a page, or all its text if no article is found."""
    try:
        import trafilatura  # noqa: PLC0415 - by format
        from lxml import etree, html  # noqa: PLC0415
    except ImportError as error:
        raise _missing(error, "HTML", "online") from error
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs pages without an article
    declared = _META_CHARSET.search(data[:META_BYTES])
    page = decode(data, declared[1].decode() if declared else "utf-8")
    try:
        text = trafilatura.extract(page, include_comments=False)
        text = (
            text
            or html.fromstring(
                page.encode(), parser=html.HTMLParser(encoding="utf-8")
            ).text_content()
        )
        title = getattr(trafilatura.extract_metadata(page), "title", None)
    except (*_BROKEN, etree.Error) as error:
        raise Unreadable(first_line(error), "an HTML page", "save it again, or drop it") from error
    return Content(title or "", text or "")


def _pdf(data: bytes) -> Content:
    """Return the text of all pages, with words that ends of lines divide joined."""
    try:
        import pypdf  # noqa: PLC0415 - by format
    except ImportError as error:
        raise _missing(error, "PDF", "pdf") from error
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("a password", "a PDF that anyone may open", "save it without one")
        pages = [page.extract_text() for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else "") or ""
    except (*_BROKEN, pypdf.errors.PyPdfError, pypdf.errors.DependencyError) as error:
        raise Unreadable(first_line(error), "a PDF", "download it again, or drop it") from error
    return Content(title, _SPLIT_WORD.sub("", "\n\n".join(pages)))


READERS: dict[str, Callable[[bytes], Content]] = {
    ".txt": _plain, ".md": _markdown, ".html": _html, ".htm": _html, ".pdf": _pdf,
}  # fmt: skip
"""Readers by the suffix of the file."""


def decode(data: bytes, charset: str = "utf-8") -> str:
    """Return the text of bytes in UTF-8, with or without a mark, or another charset."""
    try:
        return data.decode("utf-8-sig" if charset.lower() == "utf-8" else charset)
    except (UnicodeDecodeError, LookupError) as error:
        at = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        fix = "convert it, for example with iconv -f latin1 -t utf-8"
        raise Unreadable(f"no {charset}{at}", f"text in {charset.upper()}", fix) from error


def name_title(path: str) -> str:
    """Return a title from a file's name: `my_text.md` is `my text`."""
    return re.sub(r"[_\s]+", " ", Path(path.removesuffix(".gz")).stem).strip()


def _missing(error: ImportError, form: str, extra: str) -> Unreadable:
    return Unreadable(f"{form}, but {error}", "an installed reader", install_command(extra))


def _without_closing(title: str) -> str:
    """Remove the optional end of a Markdown heading, as in `# Title #`, but not the # of `C#`."""
    title = title.rstrip()
    start = title.rstrip("#")
    return title if start and not start[-1].isspace() else start.rstrip()
