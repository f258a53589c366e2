"""Comparison of the options of several runs."""

from pathlib import Path

import pytest

from search_r1.view.run import compare_options, read_config
from verl.errors import ConfigError


def test_what_differs_is_marked() -> None:
    """Nested options have dotted names; an option that a run lacks differs."""
    found = compare_options(
        [{"a": {"b": 1, "c": [1, 2]}, "d": "x"}, {"a": {"b": 1.5, "c": [1, 2]}}]
    )
    assert found == [
        {"name": "a.b", "values": ["1", "1.5"], "differs": True},
        {"name": "a.c", "values": ["[1, 2]", "[1, 2]"], "differs": False},
        {"name": "d", "values": ["x", None], "differs": True},
    ]


def test_a_damaged_configuration_is_reported(tmp_path: Path) -> None:
    """Without a file there are no options; invalid YAML raises an error of one line."""
    assert read_config(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"config.yaml: got .*fix: restore") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
