"""The table of what is plugged into the core, and how its modules are asked."""

import ast
import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verl import seams


def described() -> dict[str, list[tuple[str, list[str]]]]:
    """Return the functions, with their arguments, that the text below each seam describes."""
    body = ast.parse(Path(seams.__file__).read_text()).body
    texts = {
        node.targets[0].id: ast.literal_eval(text.value)
        for node, text in itertools.pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(text, ast.Expr)
        and isinstance(node.targets[0], ast.Name)
    }  # fmt: skip
    found = {name: re.findall(r"`(\w+)\(([\w, ]+)\)`", text) for name, text in texts.items()}
    return {name: [(f, args.split(", ")) for f, args in own] for name, own in found.items()}


def test_each_module_has_the_functions_of_its_seam() -> None:
    """With the arguments that the table says."""
    assert len(described()) == sum(isinstance(value, tuple) for value in vars(seams).values())
    for name, functions in described().items():
        assert functions, name
        for module in map(importlib.import_module, getattr(seams, name)):
            for function, arguments in functions:
                parameters = inspect.signature(getattr(module, function)).parameters
                assert len(parameters) == len(arguments), (module.__name__, function)


def test_the_first_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was deleted is left out, None is no answer, and 0 is one."""
    for name, answer in (("none", None), ("zero", 0), ("one", 1)):
        module = ModuleType(f"seam_of_tests_{name}")
        vars(module).update(__file__="", choose=lambda config, answer=answer: answer)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    seam = [f"seam_of_tests_{name}" for name in ("none", "zero", "one")]
    assert seams.first(["verl.ext.deleted", *seam], "choose", {}) == 0
    assert seams.first(seam[:1], "choose", {}) is None
