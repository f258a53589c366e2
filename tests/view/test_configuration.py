"""Options side by side."""

from pathlib import Path

import pytest

from search_r1.view.run import compared, read_config
from verl.errors import ConfigError


def test_what_differs_is_marked() -> None:
    """Nested options by dotted names; one that a run lacks differs."""
    found = compared([{"a": {"b": 1, "c": [1, 2]}, "d": "x"}, {"a": {"b": 1.5, "c": [1, 2]}}])
    assert found == [
        {"name": "a.b", "values": ["1", "1.5"], "differs": True},
        {"name": "a.c", "values": ["[1, 2]", "[1, 2]"], "differs": False},
        {"name": "d", "values": ["x", None], "differs": True},
    ]


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    """No file is no options; one that is not YAML says so in one line."""
    assert read_config(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"config.yaml: got .*fix: restore") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
