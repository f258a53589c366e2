"""Checks every call that our sources make of torch, Ray, transformers, peft and vLLM.

A script for an environment that has those packages but not ours: `calls.py ROOT`. It binds the
arguments of each call in the sources to the signature of the installed version, so that new calls
are checked too. Calls are found by name: of imports, and of attributes whose class is in
`RECEIVERS`. It prints JSON.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = {"torch", "ray", "transformers", "peft", "vllm"}
V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
RECEIVERS = {
    "self._llm": ["vllm.v1.engine.async_llm.AsyncLLM"],
    "AsyncLLM": ["vllm.v1.engine.async_llm.AsyncLLM"],
    "self._vllm": ["vllm"],
    "self.reload_weights": [f"{V1}.GPUModelRunner.reload_weights"],
    "self.model_runner": [f"{V1}.GPUModelRunner", f"{V2}.GPUModelRunner"],
    "placement": ["ray.util.placement_group.PlacementGroup"],
}
"""Attributes and variables that hold an object of the packages, with its class or function."""

ONLY_IN = {
    "attend_with_torch_varlen": lambda torch: torch >= (2, 11),
    "attend_with_torch_2_10": lambda torch: torch < (2, 11),
}
"""Functions that are for some versions of torch only."""


def load(path: str) -> Any:
    """Return the module or attribute of a dotted path. Raises ImportError or AttributeError."""
    module, rest = path, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name) or "." not in module:
                raise
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        value = getattr(value, name)
    return value


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the paths of imported modules and names of the packages, by their name in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: path for name, path in names.items() if path.partition(".")[0] in PACKAGES}


def undo_aliases(tree: ast.AST, names: dict[str, str]) -> None:
    """Rename calls of variables that a function set to an imported name to that name."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        aliases = {
            ast.unparse(node.targets[0]): node.value.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                node.func.id = aliases.get(node.func.id, node.func.id)


def targets(call: ast.Call, names: dict[str, str]) -> list[tuple[str, str]]:
    """Return the path of the owner of the called object, and the rest; empty if unknown."""
    text = ast.unparse(call.func)
    if not text.replace(".", "").replace("_", "").isalnum():
        return []  # the class of a call's result is not known
    for name, owners in {**RECEIVERS, **{n: [p] for n, p in names.items()}}.items():
        if text == name or text.startswith(f"{name}."):
            return [(owner, text[len(name) :].strip(".")) for owner in owners]
    return []


def bind(call: ast.Call, owner: str, rest: str) -> str:
    """Return `bound`, or `unsigned` if the called object has no signature.

    Raises TypeError, ImportError or AttributeError if the call would.
    """
    target = load(owner)
    method = rest
    while "." in method:  # an attribute of a module, or of a class
        step, _, method = method.partition(".")
        target = getattr(target, step)
    has_self = bool(method) and inspect.isclass(target)
    if has_self:
        has_self = not isinstance(
            inspect.getattr_static(target, method), classmethod | staticmethod
        )
    target = getattr(target, method) if method else target
    has_self |= owner.endswith("reload_weights")
    inner = getattr(getattr(target, "__func__", None), "__wrapped__", None)
    target = (
        inner if inspect.ismethod(inner) else target
    )  # transformers binds its `from_config` twice
    try:
        signature = inspect.signature(target)
    except ValueError:
        return "unsigned"
    positional = [None] * (has_self + sum(not isinstance(arg, ast.Starred) for arg in call.args))
    keys = {word.arg: None for word in call.keywords if word.arg}
    is_open = len(keys) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    (signature.bind_partial if is_open else signature.bind)(*positional, **keys)
    return "bound"


def ray_options() -> set[str]:
    """Return the options that actors and tasks of this Ray accept."""
    known = load("ray._common.ray_option_utils")
    return {*known.actor_options, *known.task_options}


def check(file: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the result and the position of each import and call in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    torch = tuple(map(int, version("torch").split(".")[:2]))
    others = {name for name, is_for in ONLY_IN.items() if not is_for(torch)}
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in others]
    names = imported(tree)
    undo_aliases(tree, names)
    for name, path in names.items():
        try:
            load(path)
        except (ImportError, AttributeError) as error:
            yield f"{type(error).__name__}: {error}", f"{file.relative_to(root)}: import of {name}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if "ray" in names and ast.unparse(call.func).endswith(".options"):
            wrong = {word.arg for word in call.keywords if word.arg} - ray_options()
            position = f"{file.relative_to(root)}:{call.lineno}: {ast.unparse(call.func)}"
            yield (f"Ray knows no {wrong}" if wrong else "bound"), position
        for owner, rest in targets(call, names):
            position = f"{file.relative_to(root)}:{call.lineno}: {ast.unparse(call.func)}"
            try:
                yield bind(call, owner, rest), position
            except (TypeError, ImportError, AttributeError) as error:
                yield f"{type(error).__name__}: {error}", position


def main(root: Path) -> None:
    """Print the bound calls, those without signature, and the wrong ones."""
    files = sorted([*root.glob("verl/**/*.py"), *root.glob("search_r1/**/*.py")])
    results = [item for file in files for item in check(file, root)]
    report = {
        "bound": sorted(
            position.rpartition(" ")[2] for result, position in results if result == "bound"
        ),
        "unsigned": sorted(
            {position.rpartition(" ")[2] for result, position in results if result == "unsigned"}
        ),
        "wrong": [
            f"{position}: {result}"
            for result, position in results
            if result not in ("bound", "unsigned")
        ],
    }
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
