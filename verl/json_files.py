"""Reads JSON files that somebody else may have written, within limits of size, depth and numbers.

Needs no torch. What the values mean is checked by the caller.
"""

import json
import math
from pathlib import Path
from typing import Any

from verl.files import read_text

MAX_CHARS = 1 << 20
MAX_BITS = 63
"""Integers must fit into the signed 64 bits of other readers and of databases."""


def read_json(path: str | Path, max_chars: int = MAX_CHARS) -> Any:
    """Return the content of a JSON file, whose numbers are finite and whose texts are Unicode.

    Raises OSError, or ValueError for every other reason.
    """
    text = read_text(path, max_chars)
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_integer)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def read_object(path: str | Path, max_chars: int = MAX_CHARS) -> dict[str, Any]:
    """Return the content of a JSON file that is an object. Raises OSError or ValueError."""
    value = read_json(path, max_chars)
    if not isinstance(value, dict):
        raise ValueError(f"a value of type {type(value).__name__}, expected an object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, expected a finite one")
    return value


def _integer(text: str) -> int:
    value = int(text)
    if value.bit_length() > MAX_BITS:
        raise ValueError(f"the integer {text[:40]}, expected at most 64 bits")
    return value
