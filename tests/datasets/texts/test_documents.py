"""Documents of each format: title and text, and what cannot be read."""

import re

import pytest

from search_r1.datasets.texts.documents import Content, Unreadable, name_title, read_document

HTML = (
    '<html><head><meta charset="{0}"><title>Zoë</title></head><body><nav>Home</nav>'
    "<article><h1>Zoë</h1><p>{1}</p></article></body></html>"
)
SENTENCES = "Die Tür zum Garten stand offen, als Zoë am Abend nach Hause kam. " * 5


def pdf(text: str, title: str = "") -> bytes:
    """Return a PDF of one page, whose lines are divided by newlines."""
    shown = " ".join(f"({line}) Tj T*" for line in text.split("\n"))
    stream = f"BT /F1 12 Tf 14 TL 72 720 Td {shown} ET".encode()
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Title(%s)>>" % title.encode(),
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(data))
        data += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(bodies) + 1)
    trailer = b"trailer<</Size %d/Root 1 0 R/Info 6 0 R>>\nstartxref\n%d\n%%%%EOF"
    return data + head + table + trailer % (len(bodies) + 1, len(data))


@pytest.mark.parametrize(
    ("suffix", "data", "expected"),
    [
        (".txt", b"\xef\xbb\xbfOne.\n", Content("", "One.\n")),
        (".md", b"\n# The Title #\nText. # Later", Content("The Title", "\nText. # Later")),
        (".md", b"# About C#\nx", Content("About C#", "\nx")),
        (".md", b"## C # ##  \r\nx", Content("C #", "\nx")),
        (".md", b"# ##\nx", Content("", "\nx")),
        (".md", b"# #1\nx", Content("#1", "\nx")),
        (".md", f"# A{' ' * 100_000}b #\nx".encode(), Content("A b", "\nx")),
    ],
)
def test_texts_and_headings(suffix: str, data: bytes, expected: Content) -> None:
    """A first heading is the title, with its closing removed, in linear time."""
    read = read_document(suffix, data)
    assert (read.title, read.text.strip()) == (expected.title, expected.text.strip())


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
def test_a_page_is_its_article(charset: str) -> None:
    """HTML is decoded as it declares; navigation is not text."""
    pytest.importorskip("trafilatura")
    read = read_document(".html", HTML.format(charset, SENTENCES).encode(charset))
    assert read.title == "Zoë" and read.text.split() == ["Zoë", *SENTENCES.split()]
    assert read_document(".htm", b"<p>Few words</p>").text.strip() == "Few words"


def test_a_pdf_is_its_pages() -> None:
    """Words that the ends of lines divide are joined, and the title is the file's own."""
    pytest.importorskip("pypdf")
    read = read_document(".pdf", pdf("Badgers dig set-\nts every year.", "The badger"))
    assert read == Content("The badger", read.text)
    assert read.text.split() == ["Badgers", "dig", "setts", "every", "year."]


@pytest.mark.parametrize(
    ("suffix", "data", "got"),
    [
        (".txt", b"ok\xe9", "byte 2"),
        (".html", b'<meta charset="klingon">x', "klingon"),
        (".html", b'<meta charset="utf-8">\xe9', "byte"),
        (".md", b" \n", "no text"),
        (".pdf", pdf(""), "no text"),
        (".pdf", b"%PDF-1.4\nbroken", "ended"),
        (".pdf", b"", "empty"),
    ],
)
def test_what_cannot_be_read_says_so(suffix: str, data: bytes, got: str) -> None:
    """Wrong charsets, broken files and files without text are named, with a fix."""
    if suffix in (".pdf", ".html"):
        pytest.importorskip({".pdf": "pypdf", ".html": "trafilatura"}[suffix])
    with pytest.raises(Unreadable, match=re.escape(got)) as raised:
        read_document(suffix, data)
    assert all(raised.value.parts)


def test_names_are_titles() -> None:
    assert name_title("a/my_small  file.v2.txt") == "my small file.v2"
