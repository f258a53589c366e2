"""Objects that are given from Python where an option names code: what they are called there.

A class or function of a file has the name that a command line has for it, `path/file.py:Name`, so
that a checkpoint made from Python is that command line's too. Anything else is `python:NAME`.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_r1.search.schema import Document
from verl.errors import ConfigError, explain
from verl.plugins import PYTHON_PREFIX, FixedInstance

Finder = Callable[[str], Sequence[Document | str]]
"""Documents, or their contents alone, for one query, best first; it may block."""


URL = "retriever.url"


@dataclass
class PythonObjects:
    """What was given, by its name in the options."""

    objects: dict[str, Any] = field(default_factory=dict)

    def name(self, option: str, one: Any, needs: str) -> str:
        """The value of `option`: a text as it is, the name of a class, function or object.

        A class or function is called with the options of the run, which gives an object with the
        part `needs`; an object has it already. Raises ConfigError.
        """
        return one if isinstance(one, str) else self._keep(one, _maker(option, one, needs))

    def tools(self, option: str, some: Any) -> list[str]:
        """The values of `option` for several tools, or for one by itself. Raises ConfigError."""
        listed = [some] if isinstance(some, str) or not isinstance(some, Iterable) else some
        return [self.name(option, tool, "label") for tool in listed]

    def retriever(self, one: Any) -> str:
        """The value of `retriever.url`: an address, or the name of what finds documents here."""
        if isinstance(one, str):
            return one
        is_function = inspect.isroutine(one)
        own = FixedInstance(FunctionRetrieval(one)) if is_function else _maker(URL, one, "search")
        return self._keep(one, own, in_file=False)  # an address is never that of a file

    def reward(self, one: Any) -> str:
        """The value of `reward_model.name`: a name, or that of a function or reward manager."""
        if isinstance(one, str) or callable(one):
            return one if isinstance(one, str) else self._keep(one, one)
        expected = "a name, a function of one dialogue, or a RewardManager"
        raise ConfigError(explain("reward_model.name", repr(one), expected, "give one of them"))

    def _keep(self, one: Any, kept: Any, in_file: bool = True) -> str:
        called = getattr(one, "__name__", None) or type(one).__name__
        name = (place_of(one) if in_file else "") or f"{PYTHON_PREFIX}{called}"
        if self.objects.get(name, kept) is not kept:  # another one of that name
            name = f"{name}_{sum(other.startswith(name) for other in self.objects) + 1}"
        self.objects[name] = kept
        return name


def _maker(option: str, one: Any, needs: str) -> Any:
    """What gives the object in each process. Raises ConfigError."""
    if inspect.isclass(one) or inspect.isroutine(one):
        return one
    if hasattr(one, needs):
        return FixedInstance(one)
    expected = f"a name, a class, or an object with {needs}"
    raise ConfigError(explain(option, repr(one), expected, "give one of them"))


def place_of(one: Any) -> str:
    """`path/file.py:Name` of a class or function that stands there; else an empty text."""
    name, module = getattr(one, "__qualname__", ""), sys.modules.get(getattr(one, "__module__", ""))
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py") or getattr(module, name, None) is not one:
        return ""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


@dataclass(frozen=True)
class FunctionRetrieval:
    """A function of one query as what an agent searches."""

    find: Finder

    async def search(self, query: str) -> list[Document]:
        """What the function finds; texts are numbered by their place."""
        found = await asyncio.to_thread(self.find, query)
        return [
            one if isinstance(one, Document) else Document.from_contents(str(number), one)
            for number, one in enumerate(found)
        ]
