"""The reader of parquet files, in memory that is bounded whatever the file unpacks to.

A file of a few kilobytes can unpack to gigabytes: a text that a thousand rows share is stored once.
Texts are therefore read as references to the distinct texts of their page, rows are measured, and
only rows within the bounds become Python objects, some at a time.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray
from pyarrow import types

from verl.data.records import (
    MAX_ROW_CHARS,
    BadRow,
    Record,
    check_kind,
    missing_column,
    short_repr,
)
from verl.errors import DataError, explain, first_line, shortened
from verl.file_kinds import HEAD_BYTES

MAX_UNPACKED = 2**28
"""What a small file may unpack to, in bytes of text, where each value counts `VALUE_BYTES` more."""
MAX_RATIO = 200
"""What a larger file may unpack to, as a multiple of its size. Question files have below 30."""
VALUE_BYTES = 64
"""What each value counts beside its text; about what a Python object takes."""
ROWS_AT_ONCE = 4096
"""Number of rows that are read and measured at a time."""
PIECE_BYTES = 2**25
"""Size of the rows that become Python objects at a time, unless a single one is larger."""
REFERABLE = frozenset({"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"})
"""Encodings that can be read as references. In others (DELTA_BYTE_ARRAY) a text may be the one
before and a letter, and both are read whole."""
WHOLE_BYTES, MIN_ROWS_AT_ONCE = 2**27, 4
"""For those: about the most bytes of a batch, and the fewest rows that are read at a time."""
FIX = "download or build it again"

TEXTS = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
Sizes = NDArray[np.int64]


def read_parquet(
    path: str, required: Sequence[str] = (), wanted: Sequence[str] | None = None
) -> Iterator[Record]:
    """Yield the rows of a parquet file in order, with all columns or with those `wanted`.

    A row over `MAX_ROW_CHARS` is a `BadRow`. Raises DataError for a file that cannot be read, lacks
    one of the `required` columns, has two of one name, or unpacks to more than the bounds.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(path, names, required)
            columns = [name for name in names if wanted is None or name in wanted]
            _check_sizes(path, file.metadata, columns)
            texts, longest = _texts(file.metadata)
        num_rows = max(MIN_ROWS_AT_ONCE, min(ROWS_AT_ONCE, WHOLE_BYTES // max(longest, 1)))
        options = {"pre_buffer": False, "buffer_size": 2**20, "read_dictionary": texts}
        with pyarrow.parquet.ParquetFile(path, **options) as file:
            start = total = 0
            for batch in _batches(file, columns, num_rows):
                sizes = _row_sizes(batch)
                total += int(sizes[sizes <= MAX_ROW_CHARS].sum())
                _check_total(path, total)
                yield from _rows_of(batch, sizes, path, start)
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        with open(path, "rb") as beginning:
            head = beginning.read(HEAD_BYTES)
        if not head.startswith(b"PAR1"):
            check_kind(path, head)
        got = shortened(first_line(error), 200)
        raise DataError(explain(path, got, "a parquet file", FIX)) from error


def _check_columns(path: str, names: Sequence[str], required: Sequence[str]) -> None:
    for column in required:
        if column not in names:
            raise DataError(explain(path, *missing_column(path, names, column)))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        got = f"two columns {short_repr(twice)}"
        raise DataError(explain(path, got, "each column once", "rename or drop one"))


def _check_sizes(path: str, metadata: Any, columns: Sequence[str]) -> None:
    """Check what the file says of itself, since a single value can take gigabytes."""
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
                width = max(VALUE_BYTES, metadata.schema.column(index).length)
                total += column.total_uncompressed_size + column.num_values * width
    _check_total(path, total)


def _check_total(path: str, total: int) -> None:
    limit = MAX_UNPACKED + MAX_RATIO * os.path.getsize(path)
    if total > limit:
        got = f"{os.path.getsize(path)} bytes that unpack to {total} or more"
        fix = "shorten its texts, or divide it into several files"
        raise DataError(explain(path, got, f"at most {limit} from a file of its size", fix))


def _texts(metadata: Any) -> tuple[list[str], int]:
    """Return the columns to read as references, and a bound for the length of any other text."""
    names: dict[str, bool] = {}
    longest = 0
    chunks = [
        group.column(index)
        for group in map(metadata.row_group, range(metadata.num_row_groups))
        for index in range(group.num_columns)
    ]
    for chunk in chunks:
        if chunk.physical_type == "BYTE_ARRAY":
            name, is_referable = chunk.path_in_schema, set(chunk.encodings) <= REFERABLE
            names[name] = names.get(name, True) and is_referable
    for chunk in chunks:  # no text is longer than all that is stored of the texts of its group
        if not names.get(chunk.path_in_schema, True):
            longest = max(longest, chunk.total_uncompressed_size)
    return [name for name, is_referable in names.items() if is_referable], longest


def _batches(file: Any, columns: Sequence[str], num_rows: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of each row group; one batch cannot have references of two groups."""
    for number in range(file.num_row_groups):
        yield from file.iter_batches(num_rows, [number], columns, use_threads=False)


def _row_sizes(batch: pyarrow.RecordBatch) -> Sizes:  # (num_rows,)
    return sum((_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))


def _sizes(array: Any) -> Sizes:
    """Return what each value takes: the bytes of its texts, and `VALUE_BYTES` for each value."""
    if isinstance(array, pyarrow.ExtensionArray):
        array = array.storage
    own: Sizes = np.full(len(array), VALUE_BYTES, np.int64)
    kind = array.type
    if types.is_dictionary(kind):
        of_texts = np.append(_sizes(array.dictionary), VALUE_BYTES)  # the last one is for nulls
        sizes: Sizes = of_texts[array.indices.fill_null(len(array.dictionary)).to_numpy()]
        return sizes
    if types.is_struct(kind):
        own += sum(_sizes(part) for part in array.flatten())
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        own += np.diff(np.append(0, _sizes(array.values).cumsum())[array.offsets.to_numpy()])
    elif types.is_fixed_size_list(kind):
        start, end = array.offset * kind.list_size, (array.offset + len(array)) * kind.list_size
        of_values = _sizes(array.values)[start:end].reshape(len(array), kind.list_size)
        own += of_values.sum(1)
    elif types.is_fixed_size_binary(kind):
        own += kind.byte_width
    elif any(is_kind(kind) for is_kind in TEXTS):
        own += pyarrow.compute.binary_length(array).fill_null(0).to_numpy()
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        return _sizes(array.cast(pyarrow.large_binary()))
    return own


def _rows_of(batch: pyarrow.RecordBatch, sizes: Sizes, path: str, start: int) -> Iterator[Record]:
    """Yield the rows of a batch; those over `MAX_ROW_CHARS` as `BadRow`."""
    first = size = 0
    for number in range(batch.num_rows):
        is_long = sizes[number] > MAX_ROW_CHARS
        if number > first and (is_long or size + sizes[number] > PIECE_BYTES):
            yield from _piece(batch, range(first, number), path, start)
            first, size = number, 0
        if is_long:
            yield start + number, _too_long(batch, number, path, start)
            first = number + 1
        else:
            size += int(sizes[number])
    if first < batch.num_rows:
        yield from _piece(batch, range(first, batch.num_rows), path, start)


def _too_long(batch: pyarrow.RecordBatch, number: int, path: str, start: int) -> BadRow:
    """Return the error about a row over the bound, with its longest column."""
    sizes = {name: int(_sizes(batch.column(name))[number]) for name in batch.schema.names}
    longest = max(sizes, key=lambda name: sizes[name])
    return BadRow.too_long(path, start + number, longest, f"{sizes[longest]} characters")


def _piece(batch: pyarrow.RecordBatch, rows: range, path: str, start: int) -> Iterator[Record]:
    """Yield some rows of a batch; one that cannot become Python objects is a `BadRow`."""
    part = batch
    if len(rows) < batch.num_rows:  # a slice would keep all texts of the batch
        part = batch.take(pyarrow.array(rows))
    try:
        fields = [field.with_type(_without_references(field.type)) for field in batch.schema]
        records = part.cast(pyarrow.schema(fields)).to_pylist()
    except (ValueError, OverflowError) as error:
        if len(rows) == 1:
            number, expected = start + rows[0], "text in UTF-8, dates of our era"
            yield number, BadRow.at(path, number, "", first_line(error), expected)
            return
        for number in rows:
            yield from _piece(batch, range(number, number + 1), path, start)
        return
    yield from zip((start + number for number in rows), records, strict=True)


def _without_references(kind: Any) -> Any:
    """Return a type with texts in place of references to them, which are slow to convert."""
    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_struct(kind):
        return pyarrow.struct([f.with_type(_without_references(f.type)) for f in kind])
    if types.is_map(kind):
        return pyarrow.map_(
            kind.key_field.with_type(_without_references(kind.key_type)),
            kind.item_field.with_type(_without_references(kind.item_type)),
        )
    for is_kind, make in (
        (types.is_list, pyarrow.list_),
        (types.is_large_list, pyarrow.large_list),
    ):
        if is_kind(kind):
            return make(kind.value_field.with_type(_without_references(kind.value_type)))
    if types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_without_references(kind.value_type))
        return pyarrow.list_(inner, kind.list_size)
    return kind
