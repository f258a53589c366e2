"""Users' files import what lies beside them, and leave the process as it was."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_r1.rewards import RewardInput
from search_r1.rewards.own import load_function
from verl import plugins
from verl.errors import ConfigError

DIALOGUE = RewardInput([], [], ["x"])


def write(folder: Path, **files: str) -> Path:
    """Write modules, named with slashes for folders, and return their folder."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def tool(folder: Path, name: str = "value") -> Any:
    return plugins.resolve("agent.tools", f"{folder}/mine.py:{name}", {})


def test_two_files_have_neighbours_of_one_name(tmp_path: Path) -> None:
    """Each gets its own; neither `sys.path` nor the modules of others change."""
    path, names = list(sys.path), {"my_utils", "json"} & sys.modules.keys()
    for folder in ("a", "b"):
        write(tmp_path / folder, mine="from my_utils import value", my_utils=f"value = '{folder}'")
    assert [tool(tmp_path / folder) for folder in "ab"] == ["a", "b"]
    assert sys.path == path and {"my_utils", "json"} & sys.modules.keys() == names


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"mine": "import my_utils\nvalue = my_utils.x", "my_utils": "x = 1"}, 1),
        ({"mine": "import my_utils as m\nvalue = m.x", "my_utils": "x = 1"}, 1),
        ({"mine": "from my_utils import *", "my_utils": "value = 1"}, 1),
        ({"mine": "from my_utils import value", "my_utils": "from other import value",
          "other": "value = 1"}, 1),
        ({"mine": "from kit.text import value", "kit/__init__": "", "kit/text": "value = 1"}, 1),
        ({"mine": "import kit.text\nvalue = kit.text.x", "kit/__init__": "",
          "kit/text": "x = 1"}, 1),
        ({"mine": "import kit.text as t\nvalue = t.x", "kit/__init__": "", "kit/text": "x = 1"},
         1),
        ({"mine": "from kit import text\nvalue = text.x", "kit/__init__": "",
          "kit/text": "x = 1"}, 1),
        ({"mine": "from kit import value", "kit/__init__": "from .text import value",
          "kit/text": "from other import value", "other": "value = 1"}, 1),
        ({"mine": "from folder.text import value", "folder/text": "value = 1"}, 1),
        ({"mine": "import random\nvalue = hasattr(random, 'choice')", "random": "x = 1"}, True),
        ({"mine": "from verl.errors import ConfigError as value", "verl/errors": "x = 1",
          "verl/__init__": ""}, ConfigError),
        ({"mine": "import utils\nvalue = utils.x", "utils": "x = 1"}, 1),
    ],
)  # fmt: skip
def test_every_form_of_import_finds_a_neighbour(
    files: dict[str, str], expected: object, tmp_path: Path
) -> None:
    """Modules, packages and their parts; Python's own modules and ours come first."""
    assert tool(write(tmp_path, **files)) == expected


def test_a_function_may_import_when_it_is_called(tmp_path: Path) -> None:
    """Also a reward, and in another thread or later."""
    lazy = "def value(*_):\n    from my_utils import x\n    return x"
    folder = write(tmp_path, mine=lazy, my_utils="x = 2.0")
    assert tool(folder)() == 2.0
    assert load_function(f"{folder}/mine.py:value")([DIALOGUE])[0].score == 2.0
    assert "my_utils" not in sys.modules


def test_a_broken_neighbour_is_named(tmp_path: Path) -> None:
    """The message has the line of the neighbour; a corrected file is read again."""
    folder = write(tmp_path, mine="from my_utils import value", my_utils="value = 1 / 0")
    with pytest.raises(ConfigError, match=r"my_utils\.py"):
        tool(folder)
    with pytest.raises(ConfigError, match="division by zero"):
        load_function(f"{folder}/mine.py:value")
    write(tmp_path, my_utils="value = 1  # corrected")
    assert tool(folder) == 1
    missing = write(tmp_path / "c", mine="import no_such_neighbour")
    with pytest.raises(ConfigError, match="no_such_neighbour"):
        tool(missing)


def test_a_module_of_the_program_is_shared(tmp_path: Path) -> None:
    """What Python finds in the same file is imported once, for the program and the user's file."""
    write(tmp_path, mine="import shared\nvalue = shared.seen", shared="seen = []")
    code = (
        "import shared; from verl.plugins import resolve; "
        f"assert resolve('x', '{tmp_path}/mine.py:value', {{}}) is shared.seen"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, env={"PYTHONPATH": root})  # fmt: skip
    assert done.returncode == 0, done.stderr
