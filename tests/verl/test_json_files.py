"""JSON files from elsewhere: read as they are, or a ValueError or OSError with the reason."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.json_files import read_json, read_object

NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "file.json"


@given(VALUES)
def test_values_are_read_as_they_were_written(file: Path, value: object) -> None:
    """Equal to what the standard library wrote."""
    file.write_text(json.dumps(value), encoding="utf-8")
    assert read_json(file) == value


@pytest.mark.parametrize(
    "content",
    [b"", b"}{", b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"1e999", b"[-1e400]", b"9" * 20,
     b"9" * 5000, b'"\\ud800"', b'{"\\udc00": 1}', b'"\xff"', b"[" * 100_000, b'{"a":' * 100_000,
     b"[] []", b"\0", b'"' + b"a" * (1 << 20) + b'"'],
    ids=range(17),
)  # fmt: skip
def test_damaged_and_hostile_files_are_one_error(content: bytes, file: Path) -> None:
    """Never another exception, nor a number that no JSON can repeat."""
    file.write_bytes(content)
    with pytest.raises((OSError, ValueError)) as caught:
        read_json(file)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("content", ["[]", "null", "1", '"a"', '[["a", 1]]'])
def test_what_is_no_object_is_refused(content: str, file: Path) -> None:
    """Pairs, of which Python would make a dict, are no object either."""
    file.write_text(content)
    with pytest.raises(ValueError, match="expected an object"):
        read_object(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A named pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(OSError):
            read_json(path)
