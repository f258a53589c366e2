"""Extraction of the article of a page, in any charset."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.online.extraction import decode, extract
from search_r1.online.fetch import Page, PageError
from tests.online.article import ARTICLE, SENTENCES


def html(body: bytes, charset: str | None = None) -> Page:
    return Page(body, "text/html", charset)


def test_only_the_article_is_extracted() -> None:
    """All sentences, one a line and in order; no script, menu or footer."""
    text = extract(html(ARTICLE.encode()))
    assert [line for line in text.split("\n") if line in SENTENCES] == SENTENCES
    assert not any(word in text for word in ("spy", "Log in", "Cookie", "<p>"))


def test_plain_text_is_not_parsed_as_html() -> None:
    """Blank lines and repeated spaces of a text/plain page are removed."""
    page = Page(b"a <b> c\r\n\r\n  d\t e \n", "text/plain", None)
    assert extract(page) == "a <b> c\nd e"


@pytest.mark.parametrize("body", [b"", b"   ", b"<html></html>", b"<!-- x -->", b"\0\0", b"<?xml"])
def test_pages_without_text_are_errors(body: bytes) -> None:
    """A page without text is a PageError, so that the snippet is kept."""
    with pytest.raises(PageError):
        extract(html(body))


@given(st.binary(max_size=300))
def test_any_bytes_give_a_text_or_an_error(body: bytes) -> None:
    """Any content of a page gives a text or a PageError."""
    try:
        assert extract(html(body))
    except PageError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "written", "declared"),
    [
        ("Grüße €", "utf-8", "utf-8"),
        ("Grüße €", "utf-8", None),
        ("Grüße €", "utf-8", "unknown-charset"),
        ("Grüße €", "utf-8", "zlib"),
        ("Grüße €", "utf-8-sig", "iso-8859-1"),
        ("Grüße €", "utf-16", None),
        ("Grüße €", "cp1252", "ISO-8859-1"),
        ("Grüße €", "cp1252", None),
        ("東京都", "shift_jis", "Shift_JIS"),
        ("Дунай", "koi8-r", "koi8-r"),
    ],
)
def test_charsets(text: str, written: str, declared: str | None) -> None:
    """Declared charsets, byte order marks and missing charsets are handled as by browsers."""
    assert decode(html(text.encode(written), declared)) == text


def test_a_charset_inside_the_page() -> None:
    """A meta tag declares the charset unless the server does."""
    head = '<html><head><meta charset="gb2312"></head>东京'
    assert decode(html(head.encode("gb2312"))) == head
    assert decode(html(head.encode("utf-8"), "utf-8")) == head


def test_a_page_truncated_within_a_character() -> None:
    """The bytes of a truncated last character are dropped, not decoded to a wrong one."""
    for charset in ("utf-8", "shift_jis"):
        body = "東京".encode(charset)[:-1]
        assert decode(html(body, charset)) == "東"


def test_binary_codecs_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that declares the charset `zlib` is not decompressed."""
    bomb = codecs.encode(b"\0" * 1000, "zlib")
    assert "\0" * 1000 not in decode(html(bomb, "zlib"))
