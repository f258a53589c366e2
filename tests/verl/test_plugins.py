"""Options that name code."""

from pathlib import Path

import pytest

from verl import plugins
from verl.errors import ConfigError


def test_a_name_is_a_row_or_an_object_of_a_file(tmp_path: Path) -> None:
    """A built-in is taken as it is, a file is executed once."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    size: int = 3\n"
    )
    assert plugins.resolve("x.name", "one", {"one": 1}) == 1
    mine = plugins.resolve("x.name", f"{file}:Mine", {"one": 1})
    assert mine().size == 3
    assert plugins.resolve("x.name", f"{file}:Mine", {"one": 1}) is mine


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("serch", r"x.name: got 'serch', expected one of search, .*did you mean 'search'"),
        ("nowhere.py:Mine", r"nowhere.py, expected a Python file that exists"),
        ("broken.py:Mine", r"broken.py \(SyntaxError"),
        ("other.py:Mine", r"got 'Mine', expected a name in .*other.py \(Yours\)"),
    ],
)
def test_what_is_not_there_is_told(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the nearest name, or what the file holds."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def (")
    Path("other.py").write_text("import os\nclass Yours: ...\n")
    with pytest.raises(ConfigError, match=expected):
        plugins.resolve("x.name", name, {"search": 1})


def test_a_path_holds_in_another_folder() -> None:
    """Built-in names stay, paths become absolute."""
    assert plugins.absolute("search") == "search"
    assert plugins.absolute("a/b.py:C") == f"{Path.cwd()}/a/b.py:C"
