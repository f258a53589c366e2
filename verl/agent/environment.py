"""The tools of a run as one environment: executes calls and combines information of all tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agent.interface import Item, Observation, Tool, ToolCall
from verl.config import Config
from verl.errors import ToolRefused, explain
from verl.plugins import user_file_errors
from verl.types import Trajectory

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "array": list, "object": dict, "null": type(None),
}  # fmt: skip
"""Python types of the JSON schema types."""
OBSERVATION = "an Observation of items that have texts, or a ToolError"
ObservationListener = Callable[[ToolCall, Observation], None]
EnvironmentFactory = Callable[[Config], "Environment"]
"""Builds the tools of a run; other processes import it by name and call it themselves."""


@dataclass(frozen=True)
class Environment:
    """The tools of a dialogue or run; it has no state between calls."""

    tools: tuple[Tool, ...] = ()
    enabled: bool = True
    """If false, every call is an invalid action, and no tool is called or probed."""
    on_observation: ObservationListener = lambda call, observation: None
    """Called for each call that returned an observation."""

    @property
    def active(self) -> tuple[Tool, ...]:
        """The tools that a run depends on."""
        return self.tools if self.enabled else ()

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the infrastructure faults of all tools."""
        return tuple(dict.fromkeys(fault for tool in self.tools for fault in tool.faults))

    def find(self, name: str) -> Tool | None:
        """Return the tool `name`, or None."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def for_dialogue(self, start: Trajectory) -> Environment:
        """Return the environment for one dialogue."""
        tools = []
        for tool in self.active:
            with user_file_errors(f"for_dialogue of {tool.label}", ToolRefused, "a tool"):
                tools.append(tool.for_dialogue(start))
        is_same = all(new is old for new, old in zip(tools, self.active, strict=True))
        return self if is_same else replace(self, tools=tuple(tools))

    def ended(self) -> dict[str, float]:
        """Return the numbers that the tools counted in the dialogue that has ended."""
        numbers: dict[str, float] = {}
        for tool in self.active:
            with user_file_errors(f"ended of {tool.label}", ToolRefused, "numbers by name"):
                numbers |= tool.ended()
        return numbers

    async def act(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Execute the calls of one turn concurrently. A ToolError cancels the other calls."""
        if len(calls) == 1:  # the common case needs no task of its own
            return [await self.call(calls[0])]
        tasks = [asyncio.ensure_future(self.call(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def call(self, call: ToolCall) -> Observation:
        """Execute one call; a mistake in the call itself is returned as the observation."""
        tool = self.find(call.tool)
        arguments = read_arguments(tool, call) if tool else unknown_tool(call, self.tools)
        if tool is None or isinstance(arguments, str):
            return Observation((Item(f"Error: {arguments}"),))
        subject = f"{tool.label}, called with {str(arguments)[:300]}"
        with user_file_errors(subject, ToolRefused, OBSERVATION):
            observation = await tool.call(**arguments)
        if not is_observation(observation):
            got = " ".join(repr(observation).split())[:300]
            raise ToolRefused(explain(subject, got, OBSERVATION, "return one"))
        self.on_observation(call, observation)
        return observation

    def is_valid(self, call: ToolCall) -> bool:
        """Whether the call names a tool and has valid arguments."""
        tool = self.find(call.tool)
        return tool is not None and not isinstance(read_arguments(tool, call), str)

    async def aclose(self) -> None:
        """Close the resources that the tools opened in this event loop."""
        for tool in self.tools:
            await tool.aclose()


def is_observation(value: object) -> bool:
    """Whether a tool's return value is a valid observation."""
    return (
        isinstance(value, Observation)
        and isinstance(value.items, tuple | list)
        and all(
            isinstance(item, Item)
            and isinstance(item.text, str)
            and isinstance(item.title, str | None)
            for item in value.items
        )
    )


def no_tools(config: Config) -> Environment:
    """Return an environment without tools."""
    return Environment()


def unknown_tool(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Return the message to the policy for a call to a tool that does not exist."""
    return f"no tool {call.tool!r}; there are: {', '.join(tool.name for tool in tools) or 'none'}"


def read_arguments(tool: Tool, call: ToolCall) -> dict[str, Any] | str:
    """Return the arguments by name, or a message if their names or types violate the schema.

    The tool itself checks ranges. A plain text is parsed as JSON if the schema accepts no text.
    """
    properties = tool.properties
    if isinstance(call.arguments, str):
        arguments: dict[str, Any] = {tool.main_argument: call.arguments}
        if "string" not in schema_types(properties[tool.main_argument]):
            with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested too deeply
                arguments[tool.main_argument] = json.loads(call.arguments)
    else:
        arguments = dict(call.arguments)
        required = tool.parameters.get("required", ())
        if not properties.keys() >= arguments.keys() >= set(required):
            return f"{tool.name} takes {', '.join(properties)}: got {', '.join(arguments)}"
    for name, value in arguments.items():
        types = schema_types(properties[name])
        if not any(isinstance(value, TYPES.get(type_name, object)) for type_name in types):
            return f"{name} of {tool.name}: got {value!r}, expected {' or '.join(types)}"
    return arguments


def schema_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema accepts; `string` if it names none."""
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if "type" not in schema and alternatives:
        return [name for alternative in alternatives for name in schema_types(alternative)]
    types = schema.get("type", "string")
    return [types] if isinstance(types, str) else list(types)
