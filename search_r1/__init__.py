"""Search agents: dialogue loop, rewards, retriever, and the Python API (docs/reference/python.md).

The names of the API are imported on first use, to keep `import search_r1` fast.
"""

import importlib
from typing import TYPE_CHECKING

import verl as verl  # before torch: it sets how idle threads wait

if TYPE_CHECKING:
    from search_r1.asking import evaluate, load_agent
    from search_r1.trainer import Trainer
    from verl.config import Config

__all__ = ["Config", "Trainer", "evaluate", "load_agent"]

_MODULES = {
    "Config": "verl.config",
    "Trainer": "search_r1.trainer",
    "evaluate": "search_r1.asking",
    "load_agent": "search_r1.asking",
}


def __getattr__(name: str) -> object:
    """Import a name of `__all__` on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
