"""Which rows of a corpus have a value in a field, for searches that are limited to them.

`search-r1 index --filter_fields year tags` keeps this beside the index. A value is a text, a number
or a bool, or each of a list; a row without the field, or with null, has none. A field and a value
make a key, such as `year=1990`, which distributed engines store with each passage.
"""

import json
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from cachetools import LRUCache

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.engines.base import Filter
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import well_formed
from verl.errors import explain

FILE_NAME = "fields.npz"
MASK_BYTES = 1 << 26
"""Most memory for the rows of filters that were asked before."""


Rows = npt.NDArray[np.integer[Any]]


class Fields:
    """The rows that have a key, of one corpus."""

    def __init__(self, num_rows: int, keys: Sequence[str], ends: Rows, rows: Rows) -> None:
        """`rows` (num_pairs,): those of each key in turn, until its `ends` (num_keys,)."""
        self._num_rows, self._ends, self._rows = num_rows, ends, rows
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._masks: LRUCache[Filter, Mask] = LRUCache(MASK_BYTES, getsizeof=len)
        self._lock = threading.Lock()

    @classmethod
    def of(cls, corpus: Corpus, names: Sequence[str]) -> "Fields":
        """Read the fields of all rows. Raises CorpusError for an object, or a field of no row."""
        rows: dict[str, array[int]] = {}
        for row, keys in enumerate(read_keys(corpus, names)):
            for key in keys:
                rows.setdefault(key, array("i")).append(row)
        ends = np.cumsum([len(numbers) for numbers in rows.values()])
        return cls(len(corpus), list(rows), ends, np.concatenate([*rows.values()]))

    def save(self, folder: Path) -> None:
        """Write the file of an index's folder."""
        keys = np.frombuffer(json.dumps(list(self._numbers)).encode(), dtype=np.uint8)
        np.savez(folder / FILE_NAME, keys=keys, ends=self._ends, rows=self._rows)

    @classmethod
    def open(cls, folder: Path, num_rows: int) -> "Fields":
        """Read the file of an index's folder, whose manifest names fields."""
        with np.load(folder / FILE_NAME, allow_pickle=False) as file:
            return cls(num_rows, json.loads(file["keys"].tobytes()), file["ends"], file["rows"])

    def rows(self, key: str) -> Rows:
        """Return the rows that have a key."""
        number = self._numbers.get(key)
        if number is None:
            return self._rows[:0]
        return self._rows[self._ends[number - 1] if number else 0 : self._ends[number]]

    def mask(self, filter: Filter) -> Mask:
        """Return which rows (num_documents,) have, of each field, one of the keys."""
        with self._lock:
            mask = self._masks.get(filter)
        if mask is None:
            mask = np.ones(self._num_rows, dtype=bool)
            for keys in filter:
                has_one = np.zeros(self._num_rows, dtype=bool)
                for key in keys:
                    has_one[self.rows(key)] = True
                mask &= has_one
            with self._lock:
                if len(mask) <= MASK_BYTES:
                    self._masks[filter] = mask
        return mask


def save_fields(fields: Fields | None, folder: Path) -> None:
    """Write the fields, if there are any, into an index's folder."""
    if fields:
        fields.save(folder)


def read_fields(corpus: Corpus, names: Sequence[str]) -> Fields | None:
    """Read the fields of all rows, if any are named. Raises CorpusError."""
    return Fields.of(corpus, names) if names else None


def read_keys(corpus: Corpus, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the keys of each row. Raises CorpusError as `keys_of`, and for a field of no row."""
    missing = list(names)
    for row in range(len(corpus)):
        keys = keys_of(corpus, names, row)
        if missing:
            found = {key.partition("=")[0] for key in keys}
            missing = [name for name in missing if name not in found]
        yield keys
    if missing:
        expected, fix = f"a field of {corpus.path}", "correct the name, or leave it out"
        raise CorpusError(explain("--filter_fields", missing[0], expected, fix))


def keys_of(corpus: Corpus, names: Sequence[str], row: int) -> list[str]:
    """Return the different keys of a row. Raises CorpusError if it, or a value, is malformed."""
    try:
        fields = json_row(corpus.line(row))
    except (ValueError, TypeError):
        corpus[row]  # raises the error of a malformed row
        raise
    try:
        return list(dict.fromkeys(k for name in names for k in _keys(name, fields.get(name))))
    except TypeError as error:
        where, fix = f"{corpus.path} row {row + 1}", "correct the row, or leave the field out"
        raise CorpusError(explain(where, error, "texts, numbers or bools", fix)) from error


def json_row(line: bytes) -> dict[str, Any]:
    """Parse a row that was read as a document before."""
    try:
        row = orjson.loads(line)
    except ValueError:  # NaN, huge integers, a byte-order mark
        row = json.loads(line.decode("utf-8-sig"))
    return dict(row)


def key(name: str, value: Any) -> str:
    """Return the key of a field's value; 1990.0 is 1990. Raises TypeError for no scalar."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):  # a bool is an int
        raise TypeError(f"{name} is {type(value).__name__}")
    return well_formed(f"{name}={json.dumps(value, ensure_ascii=False)}")


def _keys(name: str, value: Any) -> Iterator[str]:
    values = value if isinstance(value, list) else [value]
    return (key(name, value) for value in values if value is not None)
