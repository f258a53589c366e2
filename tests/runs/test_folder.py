"""A run's options: damaged and foreign files are refused in one line."""

import time
from pathlib import Path

import pytest

from search_r1.runs.folder import read_config
from tests.runs.damaged import BOMB, MERGES, configs
from verl.errors import ConfigError
from verl.yaml_files import read_yaml

CONFIGS = list(configs())


def test_a_run_without_options(tmp_path: Path) -> None:
    """No file means no options; a folder in its place is refused by its name."""
    assert read_config(tmp_path) == {}
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", CONFIGS, ids=range(len(CONFIGS)))
def test_every_config_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """The message is short, whatever the file contains."""
    (tmp_path / "config.yaml").write_bytes(content)
    try:
        read_config(tmp_path)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("content", [BOMB, MERGES])
def test_aliases_are_counted_before_they_are_expanded(tmp_path: Path, content: bytes) -> None:
    """A kilobyte that means 9^11 values is refused at once."""
    (tmp_path / "a.yaml").write_bytes(content)
    start = time.process_time()
    with pytest.raises(ValueError, match="values"):
        read_yaml(tmp_path / "a.yaml")
    assert time.process_time() - start < 1


def test_aliases_of_an_ordinary_file_are_read(tmp_path: Path) -> None:
    """Anchors and merges are used in hand-written files."""
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\nd: 2026-01-02")
    expected = {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}] * 2, "d": "2026-01-02"}
    assert read_yaml(tmp_path / "a.yaml") == expected
