"""Imports users' Python files, which may import what lies beside them.

`from my_utils import x` in a user's file finds `my_utils.py` in that file's folder, as if the file
were run as a program, also from within its functions and in the neighbours themselves. `sys.path`
stays as it is and every folder has modules of its own, so that files of two folders may each have
a `my_utils.py`. Python's own modules, and this project's, come before neighbours.
"""

import builtins
import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE_PREFIX = "plugin_"
"""Prefix of the names of modules from users' files, and of the packages of their neighbours."""
NEVER_NEIGHBOURS = sys.stdlib_module_names | {"verl", "search_r1"}
"""Modules that a neighbour of the same name does not replace."""
import_lock = threading.RLock()
"""Held while a user's file is executed. Reentrant, since its code may load another user's file."""


def module_name(path: Path) -> str:
    """Return the name of a file's module, or of a folder's package.

    It depends on the path alone, so that it is the same in every process: pickled objects refer to
    their class by it.
    """
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return f"{MODULE_PREFIX}{path.stem}_{digest[:16]}"


def execute_file(path: Path, name: str) -> ModuleType:
    """Import a file as module `name`, and return it. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = _builtins_beside(path.resolve().parent)
    sys.modules[name] = module  # dataclasses and process pools look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _builtins_beside(folder: Path) -> dict[str, Any]:
    """Return Python's builtins with an `import` that finds the modules of a folder."""

    def import_module(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not _is_neighbour(top, folder):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        package = _package_of(folder)
        module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[f"{package}.{top}"]

    return {**vars(builtins), "__import__": import_module}


def _is_neighbour(name: str, folder: Path) -> bool:
    """Whether an import of `name` in a file of the folder means a neighbour of that file."""
    if name in NEVER_NEIGHBOURS:
        return False
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    file = next((file for file in files if file.is_file()), None)
    if file is None and not (folder / name).is_dir():
        return False
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else PathFinder.find_spec(name)
    if file is None:  # a folder without __init__.py comes after everything else, as in Python
        return loaded is None and (spec is None or spec.origin is None)
    # What Python imports from this file anyway is shared with the program that imported it.
    origin = getattr(loaded, "__file__", None) or (spec.origin if spec is not None else None)
    return origin is None or Path(origin).resolve() != file.resolve()


def _package_of(folder: Path) -> str:
    """Return the name of the package that holds a folder's modules; create it if it is new."""
    name = module_name(folder)
    if name not in sys.modules:
        if not any(isinstance(finder, _Neighbours) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Neighbours())
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


class _Neighbours(MetaPathFinder):
    """Finds the modules in the packages of `_package_of`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(MODULE_PREFIX) or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _NeighbourLoader(fullname, spec.loader.path)
        return spec


class _NeighbourLoader(SourceFileLoader):
    """Executes a neighbour, which imports from the same folder as the user's file."""

    def exec_module(self, module: ModuleType) -> None:
        package = sys.modules[module.__name__.partition(".")[0]]
        vars(module)["__builtins__"] = _builtins_beside(Path(package.__path__[0]))
        super().exec_module(module)
