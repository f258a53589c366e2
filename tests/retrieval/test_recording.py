"""Records: values are read back exactly, also after a kill."""

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.recording import (
    Record,
    Recorder,
    read_facts,
    read_rows,
    to_line,
    to_record,
)
from search_r1.retrieval.schema import Document, Hit

FACTS = {"engine": "bm25", "k1": 1.5, "corpus": {"count": 8}}
PARIS = Document.from_title("d0", "Paris", "Capital\nof \u2028 France 湖")
ODD = Document("7", "another title", "another text", "no first line")
FIRST = Record("capital?", 3, [Hit(PARIS, 0.1 + 0.2), Hit(ODD, -0.0)], 1e-3 / 3)
SECOND = Record("", 1, [], 5e-324)


def bits(value: float) -> bytes:
    return struct.pack("d", value)


def read_records(path: Path) -> list[Record]:
    return [to_record(row) for _, row in read_rows(path)]


def fill(path: Path, *records: Record) -> None:
    recorder = Recorder(path, FACTS)
    recorder.write(records)
    recorder.close()


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    """Queries, documents with unusual titles, order and facts are read back."""
    fill(tmp_path / "r", FIRST, SECOND)
    assert read_records(tmp_path / "r") == [FIRST, SECOND]
    assert read_facts(tmp_path / "r") == FACTS


@given(st.floats(), st.floats(allow_nan=False), st.text())
def test_numbers_and_text_are_exact(score: float, seconds: float, text: str) -> None:
    """Scores keep their bits (any NaN is NaN) and text is unchanged, on a single line."""
    line = to_line(Record(text, 1, [Hit(Document.from_contents("1", text), score)], seconds))
    assert line.count(b"\n") == 1 and len(line.splitlines()) == 1
    row = json.loads(line)
    read = row["hits"][0]["score"]
    assert math.isnan(read) if math.isnan(score) else bits(read) == bits(score)
    assert bits(row["seconds"]) == bits(seconds)
    assert (row["query"], row["hits"][0]["contents"]) == (text, text)


def test_records_are_on_disk_before_closing(tmp_path: Path) -> None:
    """A record can be read at once after `write`, so a kill does not lose it."""
    recorder = Recorder(tmp_path / "r", FACTS)
    recorder.write([FIRST])
    assert read_records(tmp_path / "r") == [FIRST]
    recorder.close()


def test_a_kill_at_any_byte_loses_the_last_line_only(tmp_path: Path) -> None:
    """Of a file cut at any byte, complete lines are read, and a new Recorder continues there."""
    path = tmp_path / "r"
    fill(path, FIRST, SECOND)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size >= ends[0]:
            assert read_records(path) == [FIRST, SECOND][: sum(e <= size for e in ends) - 1]
        fill(path, FIRST, SECOND)
        assert path.read_bytes() == whole


def test_long_incomplete_lines_are_removed(tmp_path: Path) -> None:
    """An incomplete line that is longer than a read buffer is removed, and nothing else."""
    path = tmp_path / "r"
    fill(path, FIRST)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    fill(path)
    assert path.read_bytes() == whole


def test_a_query_is_written_once_per_k(tmp_path: Path) -> None:
    """The first result of a query and k is kept, within a write, across writes and across runs."""
    other = Record(FIRST.query, FIRST.k, [], 9.0)
    larger = Record(FIRST.query, 5, [], 9.0)
    fill(tmp_path / "r", FIRST, other)
    fill(tmp_path / "r", other, larger)
    assert read_records(tmp_path / "r") == [FIRST, larger]


def test_refuses_another_backends_record(tmp_path: Path) -> None:
    """Results of two backends are never mixed in a file, and the file is unchanged."""
    fill(tmp_path / "r", FIRST)
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(SetupError, match="another backend"):
        Recorder(tmp_path / "r", {**FACTS, "k1": 1.2})
    assert (tmp_path / "r").read_bytes() == before
    fill(tmp_path / "r", SECOND)


def test_refuses_a_second_writer(tmp_path: Path) -> None:
    """Two servers cannot write a file at the same time, only one after the other."""
    recorder = Recorder(tmp_path / "r", FACTS)
    with pytest.raises(SetupError, match="another server"):
        Recorder(tmp_path / "r", FACTS)
    recorder.close()
    fill(tmp_path / "r", FIRST)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "is not a record"),
        (b'{"format": "search-r1-record"', "is not a record"),
        (b'{"id": "1", "contents": "a corpus"}\n', "is not a record"),
        (b"\xff\xfe\n", "is not a record"),
        (b'{"format": "search-r1-record", "version": 99, "facts": {}}\n', "version 99"),
        (b'{"format": "search-r1-record", "version": 1}\n', "is not a record"),
        (b'{"format": "search-r1-record", "version": 1, "facts": [1]}\n', "is not a record"),
        (b"[" * 100_000 + b"\n", "is not a record"),
    ],
)
def test_refuses_other_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A missing, empty or foreign file is a SetupError."""
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises(SetupError, match=message):
        read_records(tmp_path / "r")


def test_never_appends_to_a_foreign_file(tmp_path: Path) -> None:
    """A corpus passed to --record by mistake is unchanged."""
    (tmp_path / "corpus").write_bytes(b'{"id": "1", "contents": "text"}\n')
    with pytest.raises(SetupError, match="is not a record"):
        Recorder(tmp_path / "corpus", FACTS)
    assert (tmp_path / "corpus").read_bytes() == b'{"id": "1", "contents": "text"}\n'


ROW = {
    "query": "a",
    "k": 1,
    "seconds": 0.5,
    "hits": [{"id": "1", "contents": '"T"\nx', "score": 1.5}],
}


@pytest.mark.parametrize(
    "line",
    [
        b'{"query": "a"}',
        b"[]",
        b"null",
        b"[" * 100_000,
        json.dumps(ROW | {"query": ["a"]}).encode(),
        json.dumps(ROW | {"k": [1]}).encode(),
        json.dumps(ROW | {"k": 0}).encode(),
        json.dumps(ROW | {"k": True}).encode(),
        json.dumps(ROW | {"seconds": float("nan")}).encode(),
        json.dumps(ROW | {"hits": [ROW["hits"][0] | {"score": float("nan")}]}).encode(),
        json.dumps(ROW | {"hits": [ROW["hits"][0] | {"score": "1"}]}).encode(),
        json.dumps(ROW | {"hits": ["a"]}).encode(),
        json.dumps(ROW | {"hits": 1}).encode(),
    ],
)
def test_names_a_malformed_line(tmp_path: Path, line: bytes) -> None:
    """A malformed line is one line of error with its number, and not skipped."""
    fill(tmp_path / "r", FIRST)
    with (tmp_path / "r").open("ab") as file:
        file.write(json.dumps(ROW).encode() + b"\n")
    assert len(read_records(tmp_path / "r")) == 2
    with (tmp_path / "r").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(SetupError, match="line 4 is not a record") as caught:
        read_records(tmp_path / "r")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    """A record in a missing folder is an error before any search."""
    with pytest.raises(SetupError, match="folder that exists"):
        Recorder(tmp_path / "none" / "r", FACTS)
