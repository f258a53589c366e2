"""Tools from plain functions: type hints and a docstring with `Args:` describe the arguments."""

import asyncio
import inspect
import json
import typing
from collections.abc import Callable
from typing import Any

from verl.agent.interface import Item, Observation, Tool
from verl.errors import ConfigError, explain

EXAMPLE = "a type hint and a line `name: meaning` below `Args:` for each argument"


def is_plain(function: object) -> bool:
    """Whether all arguments have types of JSON, so that this is no function that builds a tool."""
    if not inspect.isfunction(function) or not function.__doc__:
        return False
    hints = [p.annotation for p in inspect.signature(function, eval_str=True).parameters.values()]
    return bool(hints) and all(
        hint not in (Any, inspect.Parameter.empty)
        and (typing.get_origin(hint) or hint).__module__ in ("builtins", "types", "typing")
        for hint in hints
    )


class FunctionTool(Tool):
    """A tool that calls a function, in a thread unless it is asynchronous."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ConfigError if the docstring does not describe the arguments."""
        from transformers.utils import chat_template_utils as reading  # noqa: PLC0415 - seconds

        errors = (reading.DocstringParsingException, reading.TypeHintParsingException)
        name = function.__name__
        try:
            described = reading.get_json_schema(function)["function"]
        except errors as error:
            fix = "complete the docstring"
            raise ConfigError(explain(f"agent.tools: {name}", error, EXAMPLE, fix)) from error
        self.function, self.name = function, name
        self.description, self.parameters = described["description"], described["parameters"]

    async def call(self, **arguments: Any) -> Observation:
        """Return what the function returns: a text as it is, anything else as JSON."""
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**arguments)
        else:
            result = await asyncio.to_thread(self.function, **arguments)
        if isinstance(result, Observation):
            return result
        if result is None:
            return Observation()
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return Observation((Item(text),))
