"""Tables of each form: the same passage of all, and rows that cannot be used."""

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from search_r1.datasets.texts.rows import read_rows
from search_r1.retrieval.schema import Document
from verl.data.records import BadRow
from verl.errors import DataError

PASSAGE = Document.from_title("7", "The badger", 'It digs "setts".')
KILT = {"_id": "k7", "wikipedia_id": "7", "wikipedia_title": "The badger",
        "text": ["The badger\n", "It digs", "Section::::Life.", "BULLET::::- setts."]}  # fmt: skip


def read(data: bytes, suffix: str = ".jsonl") -> list[Document | BadRow]:
    return list(read_rows(Path(f"a{suffix}"), "deep/a", suffix, io.BytesIO(data)))


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        (".jsonl", json.dumps({"id": 7, "contents": PASSAGE.contents}).encode()),
        (".jsonl", b"\xef\xbb\xbf" + json.dumps(
            {"_id": "7", "title": PASSAGE.title, "text": PASSAGE.text, "metadata": {}}).encode()),
        (".json", json.dumps({"id": "7", "title": "The badger", "x": float("nan"),
                              "text": PASSAGE.text}).encode() + b"\n\n"),
        (".tsv", b'id\ttext\ttitle\n7\t"It digs ""setts""."\tThe badger\n'),
    ],
)  # fmt: skip
def test_forms_of_a_passage(suffix: str, data: bytes) -> None:
    """Ours, BEIR's, one with NaN, and DPR's."""
    assert read(data, suffix) == [PASSAGE]


def test_parquet_and_kilt(tmp_path: Path) -> None:
    """Vectors beside the text are not read; a page of KILT loses its title, headings and marks."""
    rows = [{"id": "7", "title": PASSAGE.title, "text": PASSAGE.text, "vector": [1.0] * 9}]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_rows(path, "a", ".parquet", io.BytesIO())) == [PASSAGE]
    page = Document.from_title("7", "The badger", "It digs\n\nsetts.")
    assert read(json.dumps(KILT).encode()) == [page]


@pytest.mark.parametrize(
    "row", [b'{"id": 1}', b'{"id": 1, "text": " "}', b"[1]", b"{", b'{"text": "\xe9"}',
            b'{"text": 3}', json.dumps(KILT | {"text": 3}).encode()],
)  # fmt: skip
def test_bad_rows_are_named(row: bytes) -> None:
    """A row without text does not stop the others, which get numbers."""
    bad, good = read(row + b'\n{"text": "x"}')
    assert isinstance(bad, BadRow) and bad.problem.startswith("a.jsonl, row 0")
    assert good == Document("deep/a#1", "", "x", "x")


@pytest.mark.parametrize(
    ("suffix", "data"),
    [(".jsonl", b'[{"id": 1}]'), (".jsonl", b"a\tb\n"), (".tsv", b"1\tx\n"), (".tsv", b"")],
)
def test_other_files_are_refused(suffix: str, data: bytes) -> None:
    """What is no table of this form is one error, with what converts it."""
    with pytest.raises(DataError, match="fix: "):
        read(data, suffix)


def test_a_row_of_too_few_fields_is_named() -> None:
    bad, good = read(b"id\ttext\n1\n2\tx\n", ".tsv")
    assert isinstance(bad, BadRow) and good == Document("2", "", "x", "x")
