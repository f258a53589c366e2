"""Reads tables with a text in each row: jsonl (also BEIR and KILT), DPR's tsv, and parquet."""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from search_r1.retrieval.row_offsets import MAX_ROW_BYTES
from search_r1.retrieval.schema import IDS, TEXTS, Document
from verl.data.parquet import read_parquet
from verl.data.records import BadRow, short_repr
from verl.errors import DataError, explain
from verl.file_kinds import HEAD_BYTES, describe_other

KILT_TITLE = "wikipedia_title"
COLUMNS = (*IDS, *TEXTS, "contents", "title", KILT_TITLE, "wikipedia_id")
"""What is read of parquet files; the corpora of DPR have columns of vectors, too."""
ROW = '{"id": "7", "title": "Title", "text": "…"}'
Row = tuple[int, Any]
"""A row's number, from 0, and its content or a BadRow."""


def read_rows(path: Path, name: str, suffix: str, stream: BinaryIO) -> Iterator[Document | BadRow]:
    """Yield the documents of a table; a row without an id gets `name#3`. Raises DataError."""
    for number, row in READERS[suffix](path, stream):
        yield row if isinstance(row, BadRow) else _document(path, f"{name}#{number}", number, row)


def _jsonl(path: Path, stream: BinaryIO) -> Iterator[Row]:
    head = stream.readline(MAX_ROW_BYTES + 1)
    if problem := describe_other(path, head[:HEAD_BYTES], "passages"):
        raise DataError(f"{path}: {problem}")
    lines = itertools.chain([head], iter(partial(stream.readline, MAX_ROW_BYTES + 1), b""))
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if len(line) > MAX_ROW_BYTES:
            raise DataError(explain(f"{path}, line {number + 1}", f"over {MAX_ROW_BYTES} bytes",
                                    "a shorter line", "one row on each line"))  # fmt: skip
        try:
            yield number, orjson.loads(line)
        except orjson.JSONDecodeError:
            try:  # a mark, NaN, or huge integers
                yield number, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                yield number, BadRow.at(str(path), number, "", error, "a JSON object in UTF-8")


def _tsv(path: Path, stream: BinaryIO) -> Iterator[Row]:
    """Yield the rows of a table with a header, quoted as Python's csv writes it."""
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = (line.decode("utf-8") for line in stream)
    reader = csv.reader(lines, delimiter="\t", strict=True)
    header = [name.strip().lstrip("\ufeff").lower() for name in next(reader, [])]
    if not {*header} & {*TEXTS, "contents"}:
        got = f"the first line {short_repr(header)}"
        fix = r"add one: printf 'id\ttext\ttitle\n'"
        raise DataError(explain(str(path), got, f"a header with {TEXTS[0]}, as DPR's", fix))
    for number, values in enumerate(reader):
        if len(values) == len(header):
            yield number, dict(zip(header, values, strict=True))
        else:
            got, expected = f"{len(values)} fields", f"{len(header)} fields, as in the header"
            yield number, BadRow.at(str(path), number, "", got, expected)


def _parquet(path: Path, _: BinaryIO) -> Iterator[Row]:
    return read_parquet(str(path), wanted=COLUMNS)


READERS = {".jsonl": _jsonl, ".json": _jsonl, ".tsv": _tsv, ".parquet": _parquet}
"""Readers by the suffix of the file."""


def _document(path: Path, default_id: str, number: int, row: object) -> Document | BadRow:
    try:
        if isinstance(row, Mapping) and KILT_TITLE in row:
            row = _kilt(row)
        document = Document.from_mapping(row, default_id)  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        got = f"no {error.args[0]}" if isinstance(error, KeyError) else error
        return BadRow.at(str(path), number, "", got, f"a row such as {ROW}")
    if not document.text.strip():
        return BadRow.at(str(path), number, "", "an empty text", "a text with words")
    return document


def _kilt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of KILT, a list of paragraphs that begins with its title, as one text."""
    title, text = row[KILT_TITLE], row["text"]
    if not (isinstance(text, Iterable) and all(isinstance(part, str) for part in text)):
        raise TypeError("text is no list of paragraphs, as KILT has it")
    paragraphs = [part.strip() for part in ([text] if isinstance(text, str) else text)]
    kept = [part.removeprefix("BULLET::::- ") for part in paragraphs[paragraphs[:1] == [title] :]
            if not part.startswith("Section::::")]  # fmt: skip
    id = next((row[name] for name in ("wikipedia_id", *IDS) if row.get(name) is not None), None)
    return {"id": id, "title": title, "text": "\n\n".join(kept)}
