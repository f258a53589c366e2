"""A small file cannot take gigabytes, and no message quotes a whole cell."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from search_r1.datasets.command import OwnOptions
from search_r1.datasets.own import read_files
from search_r1.inference.batch import read_questions
from tests.fakes import ByteTokenizer
from verl.config import Config
from verl.data.parquet import VALUE_BYTES, read_parquet
from verl.data.prompts import load_prompts
from verl.data.records import MAX_ROW_CHARS, BadRow, read_jsonl, short_repr
from verl.data.rows import load_rows
from verl.data.validation import lines, validate
from verl.errors import DataError
from verl.ext.sft.demonstrations import load_demonstrations

MB = 2**20
POOLS: list[pyarrow.MemoryPool] = []
TRUTH = {"ground_truth": {"target": ["a"]}}


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail if Arrow and Python together allocate more than `limit` bytes at their peaks."""
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    POOLS.append(pool)  # freed before its buffers, it would end the process
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        peak = pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(before)
    assert peak < limit, f"{peak / MB:.0f} MB"


def table(column: pyarrow.Array, name: str = "prompt") -> pyarrow.Table:
    """Return a table of rows that are valid, with one column replaced."""
    num_rows = len(column)
    columns = {
        "data_source": pyarrow.array(["nq"] * num_rows),
        "prompt": pyarrow.array(["Who?"] * num_rows),
        "reward_model": pyarrow.array([TRUTH] * num_rows),
    }
    return pyarrow.table({**columns, name: column})


def shared(text: str, num_rows: int) -> pyarrow.Array:
    """Return a column in which each row refers to the same text."""
    indices = pyarrow.array([0] * num_rows, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))


def in_lists(column: pyarrow.Array, length: int = 1) -> pyarrow.Array:
    """Return a column of lists of `length` values each."""
    offsets = pyarrow.array(range(0, len(column) + 1, length), pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, column)


def messages(column: pyarrow.Array) -> pyarrow.Array:
    roles = pyarrow.array(["user"] * len(column))
    return in_lists(pyarrow.StructArray.from_arrays([roles, column], ["role", "content"]))


BIG = "x" * 20_000_000
TABLES: dict[str, Callable[[], pyarrow.Table]] = {
    "one text in 100 rows": lambda: table(shared(BIG, 100)),
    "as messages": lambda: table(messages(shared(BIG, 100))),
    "below the bound of a row": lambda: table(shared(BIG[: MAX_ROW_CHARS // 2], 100)),
    "many rows": lambda: table(messages(shared(BIG[:MB], 2000))),
    "a list in one row": lambda: table(in_lists(shared(BIG, 100), 100)),
    "a column beside": lambda: table(shared(BIG, 100), "extra_info"),
    "a long list of zeros": lambda: table(
        in_lists(pyarrow.array([0]).take(pyarrow.array([0] * 5_000_000)), 5_000_000), "extra_info"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_small_parquet_does_not_take_gigabytes(name: str, tmp_path: Path) -> None:
    """It is refused in one short line by run and `validate`, which take less than 600 MB."""
    path = tmp_path / "q.parquet"
    # Without the schema of Arrow, readers take the columns for plain texts, as pandas writes them.
    pyarrow.parquet.write_table(TABLES[name](), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with memory_below(600 * MB):
        with pytest.raises(DataError) as refusal:
            load_rows(str(path))
        report = "\n".join(lines(validate([str(path)])))
        with pytest.raises(DataError):
            load_prompts(Config(), str(path), None, ByteTokenizer())
    is_over = name in ("below the bound of a row", "many rows", "a long list of zeros")
    column = "extra_info" if name == "a column beside" else "prompt"
    where = f"{path}: got " if is_over else f"{path}, row 0 (counted from 0), {column}: got "
    assert str(refusal.value).startswith(where) and len(str(refusal.value)) < 800
    assert "; fix: " in str(refusal.value)
    assert report.endswith("and 1 unusable files" if is_over else " bad rows")
    assert all(len(line) < 800 for line in report.split("\n"))


def test_only_the_long_row_is_bad(tmp_path: Path) -> None:
    """Its number and column are named; the rows around it are read, and shown in part."""
    path = tmp_path / "q.parquet"
    prompts = ["a" * 50_000, "b", BIG, "c"]
    rows = [{"data_source": "nq", "prompt": p, "reward_model": TRUTH} for p in prompts]
    pd.DataFrame(rows).to_parquet(path)
    report = validate([str(path)])
    assert [row.number for row in report.files[0].bad_rows] == [2]
    (bad,) = report.files[0].bad_rows
    assert f"{path}, row 2 (counted from 0), prompt: got {len(BIG) + VALUE_BYTES}" in bad.problem
    assert report.lengths is not None and report.lengths.largest == 50_000
    assert report.sample.startswith("aaa") and len(report.sample) < 21_000
    pd.DataFrame([rows[n] for n in (0, 1, 3)]).to_parquet(path)
    assert [row.prompt for row in load_rows(str(path))] == ["a" * 50_000, "b", "c"]


def test_columns_that_are_not_read_take_nothing(tmp_path: Path) -> None:
    """A file of rows may have large columns beside those of a question."""
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(table(shared(BIG, 100), "pages"), path, store_schema=False)
    with memory_below(20 * MB):
        assert len(load_rows(str(path))) == 100


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_every_encoding_of_texts_is_read(encoding: str, tmp_path: Path) -> None:
    """Also those that cannot be read as references."""
    path, texts = tmp_path / "q.parquet", [f"text {n}" for n in range(10)]
    pyarrow.parquet.write_table(
        table(pyarrow.array(texts)), path, use_dictionary=False, column_encoding=encoding
    )
    assert [row.prompt for row in load_rows(str(path))] == texts


@pytest.mark.parametrize("rows_in_group", [1, 3, 1000])
def test_pieces_have_all_rows_in_order(rows_in_group: int, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """However rows are divided, parquet gives what pyarrow reads as a whole."""
    monkeypatch.setattr("verl.data.parquet.PIECE_BYTES", 1500)
    monkeypatch.setattr("verl.data.parquet.ROWS_AT_ONCE", 7)
    records = [
        {"text": "é" * (n % 5 * 100), "none": None, "list": [str(n % 3)] * (n % 4), "number": n,
         "nested": {"a": [{"b": None if n % 2 else "x" * n}]}, "bytes": b"\xff" * n,
         "maybe": None if n % 3 else "y"}
        for n in range(40)
    ]  # fmt: skip
    path = tmp_path / "q.parquet"
    whole = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(whole, path, row_group_size=rows_in_group)
    assert list(read_parquet(str(path))) == list(enumerate(whole.to_pylist()))


TYPES = {
    "large": (pyarrow.large_list(pyarrow.large_string()), ["a", None]),
    "fixed": (pyarrow.list_(pyarrow.string(), 2), ["a", "b"]),
    "map": (pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.string())), [("k", ["v"])]),
    "category": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "a"),
    "bytes": (pyarrow.binary(3), b"abc"),
    "json": (pyarrow.json_(), '{"a": 1}'),
    "decimal": (pyarrow.decimal128(5, 2), None),
    "view": (pyarrow.string_view(), "abc"),
    "struct": (pyarrow.struct([("a", pyarrow.list_(pyarrow.string()))]), {"a": ["b"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_as_pyarrow_reads_it(name: str, tmp_path: Path) -> None:
    """Nested, large and fixed types, and nulls among them."""
    kind, value = TYPES[name]
    path = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"x": pyarrow.array([value, None, value], kind)}), path
    )
    assert [row for _, row in read_parquet(str(path))] == (
        pyarrow.parquet.read_table(path).to_pylist()
    )


def test_a_long_line_is_a_bad_row(tmp_path: Path) -> None:
    """It is not kept in memory, and the lines after it have their numbers."""
    path = tmp_path / "q.jsonl"
    row = json.dumps({"data_source": "nq", "prompt": "Who?", "reward_model": TRUTH})
    with path.open("w") as file:
        file.write(row + "\n")
        for _ in range(40):
            file.write(" " * MB)
        file.write("\n" + row)
    with memory_below(3 * MAX_ROW_CHARS):
        kinds = [isinstance(record, BadRow) for _, record in read_jsonl(str(path))]
        assert kinds == [False, True, False]
        (bad,) = validate([str(path)]).files[0].bad_rows
        with pytest.raises(DataError, match="row 1"):
            load_rows(str(path))
    assert bad.number == 1 and f"got {40 * MB + 1} bytes" in bad.problem
    assert [n for n, _ in read_jsonl(str(path), 200 * MB)] == [0, 2]  # a blank line that fits


def test_other_readers_are_bounded_too(tmp_path: Path) -> None:
    """A line of a csv, of demonstrations and of plain questions."""
    for name, start in (("q.csv", "question,answer\n"), ("q.jsonl", ""), ("q.txt", "")):
        (tmp_path / name).write_text(start + "x" * (MAX_ROW_CHARS + 1000))
    with memory_below(400 * MB):
        with pytest.raises(DataError, match=r"q\.csv, line 2: got more than") as csv:
            list(read_files(OwnOptions(files=(tmp_path / "q.csv",))))
        with pytest.raises(DataError, match="row 0") as jsonl:
            load_demonstrations(str(tmp_path / "q.jsonl"), ByteTokenizer(), 100)
        with pytest.raises(DataError, match="row 0") as text:
            read_questions(str(tmp_path / "q.txt"))
    assert all(len(str(error.value)) < 500 for error in (csv, jsonl, text))


LONG = "y" * 100_000
VALUES: dict[str, Any] = {
    "text": LONG,
    "list": [LONG] * 50,
    "deep": [[[[[LONG]]]]],
    "object": {LONG: LONG},
    "keys": {str(n): n for n in range(10_000)},
    "number": 10**4000,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("part", ["data_source", "prompt", "reward_model", "extra_info"])
def test_a_message_does_not_quote_a_whole_cell(name: str, part: str, tmp_path: Path) -> None:
    """Whatever the cell holds, its error is one short line."""
    path = tmp_path / "q.jsonl"
    good = {"data_source": "nq", "prompt": "Who?", "reward_model": TRUTH}
    path.write_text(json.dumps({**good, part: VALUES[name]}))
    for row in validate([str(path)]).files[0].bad_rows:
        assert len(row.problem) < 600 and "\n" not in row.problem
    assert len(short_repr(VALUES[name])) <= 80
