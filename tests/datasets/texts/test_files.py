"""Files of a corpus: which are read of a folder, and what a broken one says."""

import gzip
from pathlib import Path

import pytest

from search_r1.datasets.texts.files import TextFile, find_files
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document

ROW = b'{"id": "1", "text": "x"}\n'


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Known suffixes are read in the order of paths; the others are counted, .json by name only."""
    write(tmp_path, dict.fromkeys(["b/c.md", "a.TXT.gz", "b.jsonl", "x.docx", "y.json"], ROW))
    assert [file.name for file in find_files(tmp_path)] == ["a.TXT.gz", "b/c.md", "b.jsonl"]
    assert "1 .docx, 1 .json" in caplog.text
    assert find_files(tmp_path / "y.json") == [TextFile(tmp_path / "y.json", "y.json")]


def test_of_beir_only_the_corpus_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"corpus.jsonl.gz": b"", "queries.jsonl": ROW, "qrels/test.tsv": b""})
    assert [file.name for file in find_files(tmp_path)] == ["corpus.jsonl.gz"]


@pytest.mark.parametrize("name", ["none", "a.docx", "empty"])
def test_paths_without_texts_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"a.docx": b"", "empty/a.docx": b""})
    with pytest.raises(CorpusError, match="expected a f"):
        find_files(tmp_path / name)


def test_packed_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"a_b.txt.gz": gzip.compress(b"One."), "r.jsonl.gz": gzip.compress(ROW)})
    (text,), (row,) = (list(file.read()) for file in find_files(tmp_path))
    assert text == Document.from_title("a_b.txt.gz", "a b", "One.")
    assert row == Document("1", "", "x", "x")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.gz", gzip.compress(ROW * 9999)[:-20]),
        ("a.jsonl.gz", ROW),
        ("a.txt", b"\xe9"),
        ("a.tsv", b"id\ttext\n1\t\xe9\n"),
        ("a.tsv", b'id\ttext\n1\t"x\n'),
        ("a.parquet", b"PAR1"),
        ("a.md", b""),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    """A truncated, packed, empty or otherwise broken file ends with a message about it."""
    write(tmp_path, {name: data})
    *_, last = TextFile(tmp_path / name, name).read()
    assert isinstance(last, str) and str(tmp_path / name) in last and "fix: " in last
