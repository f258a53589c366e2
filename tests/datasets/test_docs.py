"""docs/guides/data.md matches the code: its table of sets and its commands."""

import re
import shlex
from pathlib import Path

import pytest

from search_r1.datasets.command import RECIPES
from search_r1.datasets.published import SETS
from search_r1.options import parse
from tests.datasets.collection import SPLITS

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"(?:python scripts/data_process/|search-r1 data )(\w+)(?:\.py)?((?:\\\n|[^\n#`])*)", TEXT
)


def test_table_of_sets() -> None:
    """The table has a row for every set: name, title, splits, and splits for train and test."""
    for name, splits in SPLITS.items():
        assert SETS[name].splits == splits
        train = "train" if "train" in splits else "-"
        title, all_splits = SETS[name].title, ", ".join(splits)
        row = f"| `{name}` | {title} | {all_splits} | {train} | {SETS[name].split_for('test')} |"
        assert row in TEXT
    assert set(SETS) == set(SPLITS)


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_commands_are_valid(name: str, arguments: str) -> None:
    """The arguments of each documented command are valid."""
    argv = shlex.split(arguments.replace("\\\n", " "))
    parse(RECIPES[name][0], argv, prog=name, description=None)


def test_every_script_is_documented() -> None:
    """The page has a command for each recipe; those of the original also have a script."""
    folder = Path(__file__).parents[2] / "scripts" / "data_process"
    scripts = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert (
        {name for name, _ in COMMANDS}
        == set(RECIPES)
        == scripts | {"audit", "demonstrations", "difficulty", "template"}
    )
