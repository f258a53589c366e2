"""Reads YAML files that somebody else may have written, within limits of size, depth and aliases.

Needs no torch. What the values mean is checked by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.files import read_text

MAX_CHARS = 1 << 20
MAX_VALUES = 20_000
"""Maximum number of values of a file, those behind aliases counted wherever they appear."""
MAX_DEPTH = 50
MAX_BITS = 63
"""Integers must fit into the signed 64 bits of JSON readers and databases."""


class _BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Stops after MAX_VALUES values: PyYAML reads some ten thousand a second."""

    _num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read the next value, and what is in it."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        return super().compose_node(parent, index)


def read_yaml(path: str | Path, max_chars: int = MAX_CHARS) -> Any:
    """Return the content of a YAML file: None, or mappings with text as keys, lists and scalars.

    Dates become text. Raises OSError, or ValueError for every other reason.
    """
    loader = None
    try:
        text = read_text(path, max_chars)
        loader = _BoundedLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, ())
        return _plain(loader.construct_document(node))
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # PyYAML's own constructors raise them for a tag whose text has another form.
        raise ValueError(f"a value does not have the form of its tag ({error!r})") from error
    finally:
        if loader is not None:
            loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], parents: tuple[int, ...]) -> int:
    """Return the number of values of a node with all aliases expanded, in linear time."""
    key = id(node)
    if key in parents:
        raise ValueError("a value that contains itself")
    if key in known:
        return known[key]
    if len(parents) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    below = (*parents, key)
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[key] = 1 + sum(_count(child, known, below) for child in children)
    if known[key] > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values (aliases count wherever they appear)")
    return known[key]


def _plain(value: Any) -> Any:
    """Check a value and what is in it, and return it with dates as text."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r}, which is not text")
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        value.encode()  # a lone surrogate is a UnicodeEncodeError
        return value
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError(f"an integer of {value.bit_length()} bits")
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"a value of the type {type(value).__name__}")
