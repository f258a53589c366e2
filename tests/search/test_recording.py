"""Records: what was written reads back bit for bit, also after a kill."""

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.search.errors import SetupError
from search_r1.search.recording import Record, Recorder, read_facts, read_rows, to_line, to_record
from search_r1.search.schema import Document, Hit

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
    """Queries, documents with odd titles, order and facts survive the file."""
    fill(tmp_path / "r", FIRST, SECOND)
    assert read_records(tmp_path / "r") == [FIRST, SECOND]
    assert read_facts(tmp_path / "r") == FACTS


@given(st.floats(), st.floats(allow_nan=False), st.text())
def test_numbers_and_text_are_exact(score: float, seconds: float, text: str) -> None:
    """Scores come back with the same bits (any NaN as NaN), any text unchanged, on one line."""
    line = to_line(Record(text, 1, [Hit(Document.from_contents("1", text), score)], seconds))
    assert line.count(b"\n") == 1 and len(line.splitlines()) == 1
    row = json.loads(line)
    read = row["hits"][0]["score"]
    assert math.isnan(read) if math.isnan(score) else bits(read) == bits(score)
    assert bits(row["seconds"]) == bits(seconds)
    assert (row["query"], row["hits"][0]["contents"]) == (text, text)


def test_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    """A write can be read at once, so a kill loses nothing that was written."""
    recorder = Recorder(tmp_path / "r", FACTS)
    recorder.write([FIRST])
    assert read_records(tmp_path / "r") == [FIRST]
    recorder.close()


def test_a_kill_at_any_byte_costs_the_last_line_only(tmp_path: Path) -> None:
    """Wherever the file ends, complete lines are read, and a new Recorder continues after them."""
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


def test_long_half_written_lines_are_cut_off(tmp_path: Path) -> None:
    """A half-written line longer than a read buffer goes, and only it."""
    path = tmp_path / "r"
    fill(path, FIRST)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    fill(path)
    assert path.read_bytes() == whole


def test_a_query_is_written_once_per_k(tmp_path: Path) -> None:
    """The first answer of a query and k stays, within a write, across writes and across runs."""
    other = Record(FIRST.query, FIRST.k, [], 9.0)
    larger = Record(FIRST.query, 5, [], 9.0)
    fill(tmp_path / "r", FIRST, other)
    fill(tmp_path / "r", other, larger)
    assert read_records(tmp_path / "r") == [FIRST, larger]


def test_refuses_another_engines_record(tmp_path: Path) -> None:
    """Answers of two engines never mix in a file, and the file stays as it was."""
    fill(tmp_path / "r", FIRST)
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(SetupError, match="another engine"):
        Recorder(tmp_path / "r", {**FACTS, "k1": 1.2})
    assert (tmp_path / "r").read_bytes() == before
    fill(tmp_path / "r", SECOND)


def test_refuses_a_second_writer(tmp_path: Path) -> None:
    """Two servers cannot write one file at once; when the first is done the second may."""
    recorder = Recorder(tmp_path / "r", FACTS)
    with pytest.raises(SetupError, match="another server"):
        Recorder(tmp_path / "r", FACTS)
    recorder.close()
    fill(tmp_path / "r", FIRST)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "is no record"),
        (b'{"format": "search-r1-record"', "is no record"),
        (b'{"id": "1", "contents": "a corpus"}\n', "is no record"),
        (b"\xff\xfe\n", "is no record"),
        (b'{"format": "search-r1-record", "version": 99, "facts": {}}\n', "version 99"),
    ],
)
def test_refuses_what_is_no_record(tmp_path: Path, content: bytes | None, said: str) -> None:
    """A missing, empty or foreign file is a setup error that says what was expected."""
    if content is not None:
        (tmp_path / "r").write_bytes(content)
    with pytest.raises(SetupError, match=said):
        read_records(tmp_path / "r")


def test_never_appends_to_a_foreign_file(tmp_path: Path) -> None:
    """--record naming a corpus by mistake leaves the corpus alone."""
    (tmp_path / "corpus").write_bytes(b'{"id": "1", "contents": "text"}\n')
    with pytest.raises(SetupError, match="is no record"):
        Recorder(tmp_path / "corpus", FACTS)
    assert (tmp_path / "corpus").read_bytes() == b'{"id": "1", "contents": "text"}\n'


def test_names_a_malformed_line(tmp_path: Path) -> None:
    """A damaged line in the middle is an error with its number, not a silent gap."""
    fill(tmp_path / "r", FIRST)
    with (tmp_path / "r").open("ab") as file:
        file.write(b'{"query": "a"}\n')
    with pytest.raises(SetupError, match="line 3 is no record"):
        read_records(tmp_path / "r")


def test_a_missing_folder_is_said_at_once(tmp_path: Path) -> None:
    """A record in a folder that is not there fails before a search is made."""
    with pytest.raises(SetupError, match="folder that exists"):
        Recorder(tmp_path / "none" / "r", FACTS)
