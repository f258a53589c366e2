"""Binds every call that our files make of torch, Ray, transformers, peft and vLLM to what is here.

A script for an environment that has those packages and none of ours: `calls.py ROOT`. It reads the
sources, so that a call which is written tomorrow is checked too. Calls are found by their names:
those of imports, and of attributes that `RECEIVERS` says the class of. It prints JSON.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = {"torch", "ray", "transformers", "peft", "vllm"}
V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
RECEIVERS = {
    "self._llm": ["vllm.v1.engine.async_llm.AsyncLLM"],
    "AsyncLLM": ["vllm.v1.engine.async_llm.AsyncLLM"],
    "self._vllm": ["vllm"],
    "self._lora_request": ["vllm.lora.request.LoRARequest"],
    "self.reload_weights": [f"{V1}.GPUModelRunner.reload_weights"],
    "self.model_runner": [f"{V1}.GPUModelRunner", f"{V2}.GPUModelRunner"],
    "placement": ["ray.util.placement_group.PlacementGroup"],
}
"""Attributes and variables that hold something of those packages, and what it is."""


def load(path: str) -> Any:
    """The module or attribute of that dotted path. Raises ImportError or AttributeError."""
    module, rest = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name) or "." not in module:
                raise
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for name in rest:
        found = getattr(found, name)
    return found


def imported(tree: ast.AST) -> dict[str, str]:
    """Paths of the packages' modules and names, by the name they have in a file."""
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
    """Have calls of a variable that a function set to an imported name call that name."""
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
    """What a call may reach: the path of its owner, and the rest; nothing if it is not theirs."""
    text = ast.unparse(call.func)
    if not text.replace(".", "").replace("_", "").isalnum():
        return []  # of what a call returned: nobody knows its class
    for name, owners in {**RECEIVERS, **{n: [p] for n, p in names.items()}}.items():
        if text == name or text.startswith(f"{name}."):
            return [(owner, text[len(name) :].strip(".")) for owner in owners]
    return []


def bind(call: ast.Call, owner: str, rest: str) -> str:
    """`bound`, or `unsigned` where what is called does not tell its parameters.

    Raises TypeError, ImportError or AttributeError where the call would.
    """
    found = load(owner)
    method = rest
    while "." in method:  # an attribute of a module, or of a class
        step, _, method = method.partition(".")
        found = getattr(found, step)
    has_self = bool(method) and inspect.isclass(found)
    if has_self:
        has_self = not isinstance(inspect.getattr_static(found, method), classmethod | staticmethod)
    found = getattr(found, method) if method else found
    has_self |= owner.endswith("reload_weights")
    inner = getattr(getattr(found, "__func__", None), "__wrapped__", None)
    found = (
        inner if inspect.ismethod(inner) else found
    )  # transformers binds its `from_config` twice
    try:
        signature = inspect.signature(found)
    except ValueError:
        return "unsigned"
    places = [None] * (has_self + sum(not isinstance(arg, ast.Starred) for arg in call.args))
    keys = {word.arg: None for word in call.keywords if word.arg}
    is_open = len(keys) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
    (signature.bind_partial if is_open else signature.bind)(*places, **keys)
    return "bound"


def ray_options() -> set[str]:
    """What actors and tasks of this Ray may be given."""
    known = load("ray._common.ray_option_utils")
    return {*known.actor_options, *known.task_options}


def check(file: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Each import and call of a file: what became of it, and where it is."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = imported(tree)
    undo_aliases(tree, names)
    for name, path in names.items():
        try:
            load(path)
        except (ImportError, AttributeError) as error:
            yield f"{type(error).__name__}: {error}", f"{file.relative_to(root)}: import of {name}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if "ray" in names and ast.unparse(call.func).endswith(".options"):
            wrong = {word.arg for word in call.keywords} - ray_options()
            place = f"{file.relative_to(root)}:{call.lineno}: {ast.unparse(call.func)}"
            yield (f"Ray knows no {wrong}" if wrong else "bound"), place
        for owner, rest in targets(call, names):
            place = f"{file.relative_to(root)}:{call.lineno}: {ast.unparse(call.func)}"
            try:
                yield bind(call, owner, rest), place
            except (TypeError, ImportError, AttributeError) as error:
                yield f"{type(error).__name__}: {error}", place


def main(root: Path) -> None:
    """Print what was bound, what does not tell its parameters, and what is wrong."""
    files = sorted([*root.glob("verl/**/*.py"), *root.glob("search_r1/**/*.py")])
    found = [item for file in files for item in check(file, root)]
    report = {
        "bound": sorted(place.rpartition(" ")[2] for result, place in found if result == "bound"),
        "unsigned": sorted({place.rpartition(" ")[2] for how, place in found if how == "unsigned"}),
        "wrong": [f"{place}: {how}" for how, place in found if how not in ("bound", "unsigned")],
    }
    print(json.dumps(report))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
