"""`python evaluate.py …`: `search-r1 evaluate` from a checkout (docs/guides/evaluation.md).

`import evaluate` from the checkout is still the package of that name, which this file would hide.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


def package(name: str) -> ModuleType:
    """Load the installed package. Raises ModuleNotFoundError without one."""
    spec = PathFinder.find_spec(name, [path for path in sys.path if Path(path).resolve() != HERE])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    from search_r1.cli import main

    sys.exit(main(["evaluate", *sys.argv[1:]]))
else:
    package(__name__)
