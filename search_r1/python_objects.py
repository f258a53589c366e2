"""Objects passed from Python where an option names code, and the names they get in the options.

A class or function defined in a file is named `path/file.py:Name`, as on a command line, so that a
checkpoint made from Python can be resumed from the command line. Other objects are `python:NAME`.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.protocol import Retrieval
from search_r1.retrieval.schema import Document
from verl.agent.interface import Agent, Tool
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.plugins import PYTHON_PREFIX, FixedInstance

SearchFunction = Callable[[str], Sequence[Document | str]]
"""A function that returns documents, or their contents, for a query, best first; it may block."""
RetrieverLike = Retrieval | SearchFunction | LocalServer
AgentLike = Agent | Callable[[Config], Agent]
ToolLike = Tool | Callable[[Config], Tool]


@dataclass
class PythonObjects:
    """The passed objects by their names in the options."""

    objects: dict[str, Any] = field(default_factory=dict)

    def name(self, option: str, value: Any, attribute: str) -> str:
        """Return the value of `option`: a string unchanged, or the name of the passed object.

        A class or function is later called with the run's options and returns an object with
        `attribute`; any other object must have it already. Raises ConfigError.
        """
        if isinstance(value, str):
            return value
        return self._register(value, _factory(option, value, attribute))

    def tools(self, option: str, value: Any) -> list[str]:
        """Return the names of one tool or several. Raises ConfigError."""
        is_single = isinstance(value, str) or not isinstance(value, Iterable)
        return [self.name(option, tool, "label") for tool in ([value] if is_single else value)]

    def retriever(self, value: Any) -> str:
        """Return the value of `retriever.url`: an address, or the name of the passed retriever."""
        if isinstance(value, str):
            return value
        source = FunctionRetrieval(value) if inspect.isroutine(value) else value
        factory = _factory("retriever.url", source, "search")
        return self._register(value, factory, may_use_path=False)  # an address cannot name a file

    def reward(self, value: Any) -> str:
        """Return the value of `reward_model.name`: a name, or that of a function or manager."""
        if isinstance(value, str):
            return value
        if callable(value):
            return self._register(value, value)
        expected = "a name, a function of one dialogue, or a RewardManager"
        raise ConfigError(explain("reward_model.name", repr(value), expected, "give one of them"))

    def _register(self, value: Any, registered: Any, may_use_path: bool = True) -> str:
        """Store `registered` under the name of `value`, made unique if necessary; return it."""
        short_name = getattr(value, "__name__", None) or type(value).__name__
        stem = (path_name(value) if may_use_path else "") or f"{PYTHON_PREFIX}{short_name}"
        name, number = stem, 1
        while self.objects.get(name, registered) is not registered:  # the name is taken
            number += 1
            name = f"{stem}_{number}"
        self.objects[name] = registered
        return name


def _factory(option: str, value: Any, attribute: str) -> Any:
    """Return the function of the options that gives the object. Raises ConfigError."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value
    if hasattr(value, attribute):
        return FixedInstance(value)
    expected = f"a name, a class, or an object with {attribute}"
    raise ConfigError(explain(option, repr(value), expected, "give one of them"))


def path_name(value: Any) -> str:
    """Return `path/file.py:Name` of a class or function defined in a file; else ''."""
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", ""))
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py") or getattr(module, name, None) is not value:
        return ""
    path = Path(file).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{name}"


@dataclass(frozen=True)
class FunctionRetrieval:
    """A retriever that calls a user's search function in a thread."""

    find: SearchFunction

    async def search(self, query: str) -> list[Document]:
        """Return the function's documents; plain texts get their rank as id."""
        results = await asyncio.to_thread(self.find, query)
        return [
            result if isinstance(result, Document) else Document.from_contents(str(number), result)
            for number, result in enumerate(results)
        ]
