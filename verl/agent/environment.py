"""The tools of a run taken together: calls carried out, and what is known of all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl import plugins
from verl.agent.interface import Item, Observation, Tool, ToolCall
from verl.config import Config
from verl.errors import ToolError, ToolRefused, explain
from verl.types import Trajectory

TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "array": list, "object": dict, "null": type(None),
}  # fmt: skip
"""Of JSON schema, as Python reads them."""
OBSERVATION = "an Observation of items that have texts, or a ToolError"
ObservationListener = Callable[[ToolCall, Observation], None]
EnvironmentFactory = Callable[[Config], "Environment"]
"""Makes the tools of a run; processes elsewhere call it by name, each for itself."""


@dataclass(frozen=True)
class Environment:
    """What a policy acts on. It keeps nothing between calls."""

    tools: tuple[Tool, ...] = ()
    enabled: bool = True
    """False makes every call an invalid action: no tool is asked, nor waited for."""
    on_observation: ObservationListener = lambda call, observation: None
    """Hears each call that was answered."""

    @property
    def active(self) -> tuple[Tool, ...]:
        """The tools that a run depends on."""
        return self.tools if self.enabled else ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What may happen to calls, by name."""
        return tuple(dict.fromkeys(fault for tool in self.tools for fault in tool.faults))

    def find(self, name: str) -> Tool | None:
        """The tool of that name, if there is one."""
        return next((tool for tool in self.tools if tool.name == name), None)

    @property
    def anticipates(self) -> bool:
        """Whether a tool wants to hear of calls before they are made."""
        return any(tool.anticipates for tool in self.active)

    def for_dialogue(self, start: Trajectory) -> Environment:
        """The tools as one dialogue has them."""
        tools = []
        for tool in self.active:
            with plugins.user_file_errors(f"for_dialogue of {tool.label}", ToolRefused, "a tool"):
                tools.append(tool.for_dialogue(start))
        is_same = all(one is tool for one, tool in zip(tools, self.active, strict=True))
        return self if is_same else replace(self, tools=tuple(tools))

    def anticipate(self, calls: Iterable[ToolCall]) -> None:
        """Tell the tools of calls that may come."""
        for call in calls:
            tool = self.find(call.tool)
            if tool is None or not tool.anticipates:
                continue
            arguments = read_arguments(tool, call)
            if not isinstance(arguments, str):
                with plugins.user_file_errors(
                    f"anticipate of {tool.label}", ToolRefused, "no error"
                ):
                    tool.anticipate(**arguments)

    def ended(self) -> dict[str, float]:
        """What the tools counted in the dialogue that is over."""
        found: dict[str, float] = {}
        for tool in self.active:
            with plugins.user_file_errors(f"ended of {tool.label}", ToolRefused, "numbers by name"):
                found |= tool.ended()
        return found

    async def act(self, calls: Sequence[ToolCall]) -> list[Observation]:
        """Carry out the calls of one turn, at once. Raises ToolError, which ends the others."""
        if len(calls) == 1:  # in the task of the trajectory: no task for the common case
            return [await self.call(calls[0])]
        tasks = [asyncio.ensure_future(self.call(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def call(self, call: ToolCall) -> Observation:
        """Carry out one call; what is wrong with the call itself is the observation."""
        tool = self.find(call.tool)
        arguments = read_arguments(tool, call) if tool else unknown(call, self.tools)
        if tool is None or isinstance(arguments, str):
            return Observation((Item(f"Error: {arguments}"),))
        subject = f"{tool.label}, called with {str(arguments)[:300]}"
        with plugins.user_file_errors(subject, ToolRefused, OBSERVATION):
            observation = await tool.call(**arguments)
        if not is_observation(observation):
            got = " ".join(repr(observation).split())[:300]
            raise ToolRefused(explain(subject, got, OBSERVATION, "return one"))
        self.on_observation(call, observation)
        return observation

    def is_sound(self, call: ToolCall) -> bool:
        """Whether the call names a tool and has the arguments that it needs."""
        tool = self.find(call.tool)
        return tool is not None and not isinstance(read_arguments(tool, call), str)

    def probe(self, seconds: float) -> tuple[Tool, str] | None:
        """The first tool that does not answer and what is wrong, or None. Raises ToolRefused."""
        for tool in self.active:
            with plugins.user_file_errors(f"probe of {tool.label}", ToolRefused, "a text"):
                problem = tool.probe(seconds)
            if problem:
                return tool, problem
        return None

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """What stands in the way of a run that is to begin."""
        for tool in self.active:
            with plugins.user_file_errors(
                f"preflight of {tool.label}", ToolRefused, "what is wrong"
            ):
                yield from tool.preflight(seconds)

    def identity(self) -> dict[str, str]:
        """The fingerprints of all tools."""
        found: dict[str, str] = {}
        for tool in self.active:
            with plugins.user_file_errors(
                f"identity of {tool.label}", ToolRefused, "fingerprints by name"
            ):
                found |= tool.identity()
        return found

    def settings(self) -> dict[str, Any]:
        """What is written beside an exported model."""
        return {name: value for tool in self.tools for name, value in tool.settings().items()}

    async def aclose(self) -> None:
        """Close what the tools opened in this event loop."""
        for tool in self.tools:
            await tool.aclose()


def is_observation(found: object) -> bool:
    """Whether a tool gave what it is to give."""
    return (
        isinstance(found, Observation)
        and isinstance(found.items, tuple | list)
        and all(
            isinstance(item, Item)
            and isinstance(item.text, str)
            and isinstance(item.title, str | None)
            for item in found.items
        )
    )


def no_tools(config: Config) -> Environment:
    """The environment of a run without tools."""
    return Environment()


def unknown(call: ToolCall, tools: Sequence[Tool]) -> str:
    """What a policy is told of a call to a tool that does not exist."""
    return f"no tool {call.tool!r}; there are: {', '.join(tool.name for tool in tools) or 'none'}"


def read_arguments(tool: Tool, call: ToolCall) -> dict[str, Any] | str:
    """The arguments by name, or what is wrong with them.

    Names and types are checked against the schema, ranges are for the tool to check; a text alone
    is read as JSON where the schema wants no text.
    """
    properties = tool.properties
    if isinstance(call.arguments, str):
        name, value = tool.main_argument, call.arguments
        wanted = types_of(properties[name])
        if "string" in wanted:
            return {name: value}
        try:
            return {name: json.loads(value)}
        except ValueError:
            return f"{name} of {tool.name}: got {value!r}, expected {' or '.join(wanted)}"
    missing = [name for name in tool.parameters.get("required", ()) if name not in call.arguments]
    others = [name for name in call.arguments if name not in properties]
    if missing or others:
        return f"{tool.name} takes {', '.join(properties)}: got {', '.join(call.arguments)}"
    for name, value in call.arguments.items():
        wanted = types_of(properties[name])
        if not any(isinstance(value, TYPES.get(one, object)) for one in wanted):
            return f"{name} of {tool.name}: got {value!r}, expected {' or '.join(wanted)}"
    return dict(call.arguments)


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that an argument may have, one or several; a text where its schema names none."""
    if "type" not in schema and (others := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]):
        return [name for one in others for name in types_of(one)]
    named = schema.get("type", "string")
    return [named] if isinstance(named, str) else list(named)
