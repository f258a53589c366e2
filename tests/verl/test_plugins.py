"""Options that name code: built-in entries, objects in files, and errors of user code."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from search_r1.rewards.own import load_function
from verl import plugins
from verl.errors import ConfigError, ToolError


def test_a_name_is_a_built_in_entry_or_an_object_of_a_file(tmp_path: Path) -> None:
    """A built-in entry is returned as it is; a file is executed once."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    size: int = 3\n"
    )
    assert plugins.resolve("x.name", "one", {"one": 1}) == 1
    mine = plugins.resolve("x.name", f"{file}:Mine", {"one": 1})
    assert mine().size == 3
    assert plugins.resolve("x.name", f"{file}:Mine", {"one": 1}) is mine


def test_a_module_that_was_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose folder has compiled files left, as git leaves it, or which lacks a part."""
    (tmp_path / "beside" / "left" / "__pycache__").mkdir(parents=True)
    (tmp_path / "beside" / "__init__.py").touch()
    (tmp_path / "beside" / "there.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.optional("beside.left") is None
    assert plugins.optional("beside.gone") is None
    assert plugins.optional("beside.left.part") is None
    there = plugins.optional("beside.there")
    assert there is not None and there.x == 1
    (tmp_path / "beside" / "needy.py").write_text("from beside.needy.part import x\n")
    assert plugins.optional("beside.needy") is None
    (tmp_path / "beside" / "broken.py").write_text("import beside_nothing\n")
    with pytest.raises(ModuleNotFoundError):
        plugins.optional("beside.broken")


def test_a_built_in_entry_whose_file_was_deleted_is_named() -> None:
    """Commands besides runs load engines too; what else is missing is no such error."""
    with pytest.raises(ConfigError, match="verl/ext/gone"):
        plugins.load("x.name", "one", {"one": "verl.ext.gone:Engine"})
    with pytest.raises(ModuleNotFoundError):
        plugins.load("x.name", "one", {"one": "beside_nothing:Engine"})


def test_a_file_that_two_options_name_is_executed_once(tmp_path: Path) -> None:
    """An agent and a tool of one file share its module, and their objects can be pickled."""
    file = tmp_path / "both.py"
    file.write_text("class Agent: ...\nclass Tool: ...\n")
    agent = plugins.resolve("agent.name", f"{file}:Agent", {})
    tool = plugins.resolve("agent.tools", f"{file}:Tool", {})
    assert sys.modules[agent.__module__] is sys.modules[tool.__module__]
    assert type(pickle.loads(pickle.dumps(agent()))) is agent


def test_a_second_thread_waits_for_a_file_that_is_executed(tmp_path: Path) -> None:
    """It never sees a partly executed module."""
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.3)\nclass Mine: ...\n")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: plugins.resolve("x", f"{file}:Mine", {}), range(2))
    assert first is second


def test_a_file_has_the_same_module_name_in_every_process(tmp_path: Path) -> None:
    """So that objects pickled in another process are found by the name of their module."""
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n")
    code = f"from verl.plugins import resolve; print(resolve('x', '{file}:Mine', {{}}).__module__)"
    names = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in "01"
    }  # fmt: skip
    assert len(names) == 1


def test_a_file_that_failed_is_read_again(tmp_path: Path) -> None:
    """After it was corrected, for example in a notebook."""
    file = tmp_path / "fixed.py"
    file.write_text("raise RuntimeError('not yet')")
    with pytest.raises(ConfigError, match="not yet"):
        plugins.resolve("x.name", f"{file}:Mine", {})
    file.write_text("class Mine: ...\n")
    assert plugins.resolve("x.name", f"{file}:Mine", {}).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("serch", r"x.name: got 'serch', expected one of search, .*did you mean search"),
        ("nowhere.py:Mine", r"nowhere.py, expected a Python file that exists"),
        ("broken.py:Mine", r"broken.py \(SyntaxError"),
        ("other.py:Mine", r"got 'Mine', expected a name in .*other.py \(Yours\)"),
    ],
)
def test_an_unknown_name_is_one_clear_line(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the nearest name, or the names that the file defines."""
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def (")
    Path("other.py").write_text("import os\nclass Yours: ...\n")
    with pytest.raises(ConfigError, match=expected):
        plugins.resolve("x.name", name, {"search": 1})


USER_FILES = {
    "raises.py": "raise RuntimeError('one\\ntwo')",
    "ends.py": "raise SystemExit(3)",
    "unknown.py": "undefined_name",
    "zeros.py": "x = '\0'",
    "lacks.py": "import no_such_module",
    "loops.py": "def again(n): return again(n)\nagain(1)",
    "number.py": "f = 3",
    "two.py": "def f(one, other): return one",
    "nothing.py": "def f(config): return None",
    "fails.py": "def f(config): raise KeyError('x')",
}
"""User files, none of which provides a tool, an agent or a reward."""


@pytest.mark.parametrize("file", USER_FILES)
def test_any_error_of_user_code_is_one_line(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that fails, or provides another kind of object, is for the user to fix."""
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(USER_FILES[file])
    with pytest.raises(ConfigError) as caught:
        plugins.build("x.name", f"{file}:f", {}, None, needs="run")
    assert str(caught.value).startswith("x.name: got ") and "\n" not in str(caught.value)
    if file not in ("nothing.py", "fails.py"):  # which fail only when they are called
        with pytest.raises(ConfigError, match=file):
            load_function(f"{file}:f")


def test_user_code_may_raise_its_own_user_errors(tmp_path: Path) -> None:
    """UserErrors of user code, and its results, are passed on unchanged."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.errors import ToolError\n"
        "def f(config):\n    if config is None: raise ToolError('no key')\n    return [config]\n"
    )
    with pytest.raises(ToolError, match=r"^no key$"):
        plugins.build("x.name", f"{file}:f", {}, None, needs="pop")
    assert plugins.build("x.name", f"{file}:f", {}, 3, needs="pop") == [3]


def test_an_absolute_name_is_valid_in_another_folder() -> None:
    """Built-in names stay unchanged, paths become absolute."""
    assert plugins.absolute("search") == "search"
    assert plugins.absolute("a/b.py:C") == f"{Path.cwd()}/a/b.py:C"
