"""The corpus: rows by offset, fingerprints, stored offsets, and malformed rows."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.corpus import Corpus, sample_indices
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document
from tests.retrieval.conftest import write_corpus


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_equal_a_plain_parse(corpus_path: Path) -> None:
    """Reading by offset equals parsing the file line by line."""
    lines = corpus_path.read_bytes().split(b"\n")[:-1]
    expected = [json.loads(line) for line in lines]
    corpus = Corpus.open(corpus_path)
    assert [(d.id, d.contents) for d in corpus] == [(r["id"], r["contents"]) for r in expected]
    assert [d.id for d in corpus.documents([3, 0])] == ["d3", "d0"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"id":1,"contents":"a"}', ["1"]),
        ('{"id":"1","contents":"a"}\n{"id":"2","contents":"b"}', ["1", "2"]),
        ('\n{"id":"1","contents":"a"}\n\n{"id":"2","contents":"b"}\n\n', ["1", "2"]),
        ('{"id":"1","contents":"a"}\r\n{"id":"2","contents":"b"}\r\n', ["1", "2"]),
    ],
)
def test_line_ends(tmp_path: Path, text: str, ids: list[str]) -> None:
    """A missing last newline, blank lines and CRLF make no difference."""
    path = tmp_path / "c.jsonl"
    path.write_bytes(text.encode())
    assert [document.id for document in Corpus.open(path)] == ids


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "1", "contents": '"A \\"b\\" c"\nx\ny'}, ('A \\"b\\" c', "x\ny")),
        ({"id": "1", "contents": "no title here"}, ("", "no title here")),
        ({"id": "1", "contents": "Bare\ntext"}, ("Bare", "text")),
        ({"id": "1", "title": "T", "text": "x"}, ("T", "x")),
        ({"id": "1", "contents": '"T"\nx', "title": "U", "text": None}, ("U", "x")),
    ],
)
def test_title_and_text(row: dict[str, str], expected: tuple[str, str]) -> None:
    """Title and text are derived from contents unless the row has them."""
    document = Document.from_mapping(row)
    assert (document.title, document.text) == expected


def test_contents_are_joined_from_title_and_text() -> None:
    """A row without contents gets them in the format of wiki-18."""
    document = Document.from_mapping({"id": 7, "title": "T", "text": "x"})
    assert document == Document("7", "T", "x", '"T"\nx')


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{oops}", "property name"),
        ('["a"]', "list, expected an object"),
        ('{"id": "1"}', "'text' is missing"),
        ('{"id": "1", "title": "a"}', "'text' is missing"),
        ('{"id": "1", "contents": null}', "'text' is missing"),
        ('{"id": [1], "contents": "a"}', "id is list"),
        ('{"id": 1.5, "contents": "a"}', "id is float"),
        ('{"id": "1", "contents": 7}', "contents is int"),
        ('{"id": "1", "contents": "a \\ud800"}', "surrogates not allowed"),
    ],
)
def test_malformed_row_is_reported_with_its_number(tmp_path: Path, row: str, problem: str) -> None:
    """A malformed row is an error with its number, what was got and what was expected."""
    good = '{"id": "0", "contents": "fine"}\n'
    corpus = Corpus.open(write(tmp_path / "c.jsonl", good + row + "\n" + good))
    assert corpus[0].contents == corpus[2].contents == "fine"
    with pytest.raises(CorpusError, match=r"row 2 \(byte 32\)") as caught:
        corpus[1]
    assert problem in str(caught.value)
    assert "expected a JSON object" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"contents": "a"}', ("1", "", "a")),
        ('{"id": null, "text": "a"}', ("1", "", "a")),
        ('{"_id": "x", "title": "T", "text": "a"}', ("x", "T", "a")),
        ('{"docid": 4, "title": null, "passage": "a"}', ("4", "", "a")),
        ('{"id": 7.0, "contents": "T\\na"}', ("7", "T", "a")),
    ],
)
def test_rows_of_other_corpora_are_read(
    tmp_path: Path, row: str, expected: tuple[str, str, str]
) -> None:
    """A row without an id gets its number; BEIR's and other names are known."""
    good = '{"id": "g", "contents": "fine"}\n'
    document = Corpus.open(write(tmp_path / "c.jsonl", good + row + "\n"))[1]
    assert (document.id, document.title, document.text) == expected


@pytest.mark.parametrize(
    "row",
    [
        '{"id": "1", "contents": "a", "rank": NaN}',
        '{"id": 123456789012345678901234567890, "contents": "a"}',
        '\ufeff{"id": "1", "contents": "a"}',
    ],
)
def test_rows_that_only_python_reads(tmp_path: Path, row: str) -> None:
    """A row that orjson refuses but json accepts is still a document."""
    expected = str(json.loads(row.lstrip("\ufeff"))["id"])
    document = Corpus.open(write(tmp_path / "c.jsonl", row + "\n"))[0]
    assert (document.id, document.contents) == (expected, "a")


def test_stored_offsets_are_used_unless_outdated(tmp_path: Path) -> None:
    """A changed file, even of equal size, is scanned again and has another fingerprint."""
    path = write(tmp_path / "c.jsonl", '{"id": "1", "contents": "ab"}\n')
    first = Corpus.open(path).fingerprint
    assert (tmp_path / "c.jsonl.offsets.npy").is_file()
    assert Corpus.open(path).fingerprint == first
    write(path, '{"id": "1", "contents": "ba"}\n')
    os.utime(path, ns=(1, 1))
    changed = Corpus.open(path).fingerprint
    assert (changed.count, changed.size) == (first.count, first.size)
    assert changed.digest != first.digest


def test_broken_offsets_are_replaced(tmp_path: Path) -> None:
    """An offsets file that is not an array is computed again."""
    path = write(tmp_path / "c.jsonl", '{"id": "1", "contents": "ab"}\n')
    write(tmp_path / "c.jsonl.offsets.npy", "not an array")
    assert len(Corpus.open(path)) == 1


def test_fingerprint_does_not_depend_on_the_path(tmp_path: Path) -> None:
    """A copied corpus is the same corpus."""
    text = '{"id": "1", "contents": "ab"}\n'
    (tmp_path / "x").mkdir()
    copies = [write(tmp_path / "c.jsonl", text), write(tmp_path / "x" / "d.jsonl", text)]
    assert Corpus.open(copies[0]).fingerprint == Corpus.open(copies[1]).fingerprint


def test_a_corpus_edited_with_equal_mtime_is_scanned_by_verify(tmp_path: Path) -> None:
    """With equal size and mtime only `whole` sees the other content."""
    path = write_corpus(tmp_path / "c.jsonl")
    before = Corpus.open(path).fingerprint
    time = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("Paris is", "Paris as"))
    os.utime(path, ns=(time, time))
    assert Corpus.open(path).fingerprint == before != Corpus.open(path, whole=True).fingerprint


@given(st.integers(0, 300), st.integers(2, 70))
def test_sampled_indices_include_both_ends(count: int, max_samples: int) -> None:
    """All indices of a small range; of a large one a sorted sample with both ends."""
    indices = list(sample_indices(count, max_samples))
    assert indices == sorted(set(indices))
    assert min(count, max_samples - 2) <= len(indices) <= min(count, max_samples)
    assert not count or (indices[0], indices[-1]) == (0, count - 1)
