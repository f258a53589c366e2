"""Requests of a loop in OpenAI's format, and what the gateway makes of them.

Whatever would change what is sampled is either done or refused: nothing is ignored in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from search_r1.agent_server.requests import UNSUPPORTED, Text, text_of
from search_r1.agent_server.responses import ApiError
from verl.types import Sampling

REFUSED = "unsupported_parameter"
"""Error code of a request that asks for what a run cannot give, whatever the episode."""
ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in UNSUPPORTED.items() if name not in ("tools", "stop")},
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Values, besides null, of fields that are not implemented: those that change nothing."""
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that say something about the caller and change no answer."""


class WrittenFunction(BaseModel):
    """The function of a tool call, with its arguments as JSON."""

    name: str
    arguments: str = "{}"


class WrittenCall(BaseModel):
    """A tool call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: WrittenFunction


class LoopMessage(BaseModel):
    """A message; fields of it that are not read must be empty."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = None
    name: str | None = None
    tool_calls: list[WrittenCall] | None = None
    tool_call_id: str | None = None


class LoopStreamOptions(BaseModel):
    """What a stream contains."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class LoopRequest(BaseModel):
    """`POST /v1/chat/completions`; every model name means the policy."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[LoopMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: LoopStreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request: the conversation, and how to continue it."""

    messages: tuple[Mapping[str, Any], ...]
    """As a chat template reads them: texts as strings, arguments of calls as objects."""
    tools: tuple[Mapping[str, Any], ...]
    stop: tuple[str, ...]
    max_tokens: int | None
    streams: bool
    includes_usage: bool

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def read_request(body: bytes, sampling: Sampling) -> CompletionRequest:
    """Read a request of a run that trains with `sampling`. Raises ApiError."""
    try:
        request = LoopRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{name or 'body'}: {first['msg']}", param=name or None) from error
    check_fields(request, sampling)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    options = request.stream_options
    return CompletionRequest(
        tuple(read_messages(request.messages)),
        tuple(map(read_tool, request.tools or ())),
        tuple(filter(None, stop)),
        request.max_completion_tokens or request.max_tokens,
        bool(request.stream),
        options is not None and bool(options.include_usage),
    )


def check_fields(request: LoopRequest, sampling: Sampling) -> None:
    """Raise ApiError for a field that a run cannot follow, or that nobody knows."""
    for name, value in (request.model_extra or {}).items():
        if value is not None and name not in HARMLESS and value not in ACCEPTED.get(name, ()):
            message = f"{name}: got {json.dumps(value)[:200]}, which the gateway of a run does not "
            raise ApiError(400, f"{message}support; fix: leave it out", REFUSED, name)
    for name in ("temperature", "top_p"):
        given, expected = getattr(request, name), getattr(sampling, name)
        if given is not None and given != expected:
            option = f"actor_rollout_ref.rollout.{name}"
            message = (
                f"{name}: got {given}, expected {expected}, with which the run samples; fix: leave "
                f"it out, or set {option}={given}"
            )
            raise ApiError(400, message, REFUSED, name)


def read_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool in the form that chat templates read. Raises ApiError for no function."""
    function = tool.get("function")
    is_function = tool.get("type") == "function" and isinstance(function, Mapping)
    if not is_function or not isinstance(function, Mapping) or not function.get("name"):
        message = "tools: expected {type: function, function: {name, description, parameters}}"
        raise ApiError(400, message, param="tools")
    shown = {name: part for name, part in function.items() if part is not None}
    if shown.pop("strict", False):
        message = "tools: strict=true is not supported, since nothing constrains what is sampled"
        raise ApiError(400, f"{message}; fix: leave it out", REFUSED, "tools")
    return {"type": "function", "function": shown}


def read_messages(messages: Sequence[LoopMessage]) -> list[Mapping[str, Any]]:
    """Return messages for a chat template. Raises ApiError as OpenAI does for a broken order."""
    found: list[Mapping[str, Any]] = []
    open_calls: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        for name, value in (message.model_extra or {}).items():
            if value not in (None, [], {}, ""):
                text = f"{where}.{name} is not supported; fix: leave it out"
                raise ApiError(400, text, REFUSED, "messages")
        shown: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": text_of(message.content, f"{where}: ", REFUSED),
        }
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                text = f"{where}: a tool message must answer one of the preceding tool_calls"
                raise ApiError(400, text, param="messages")
            shown["name"] = open_calls.pop(message.tool_call_id)
        elif open_calls:
            text = f"{where}: no tool message answers the tool_call_id {next(iter(open_calls))}"
            raise ApiError(400, text, param="messages")
        if message.tool_calls and message.role == "assistant":
            open_calls = {call.id: call.function.name for call in message.tool_calls}
            shown["tool_calls"] = [read_call(call, where) for call in message.tool_calls]
        found.append(shown)
    if open_calls or found[-1]["role"] == "assistant":
        text = "the last message must be of role user or tool, and answer all tool_calls"
        raise ApiError(400, text, param="messages")
    return found


def read_call(call: WrittenCall, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates write it."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        text = f"{where}.tool_calls: the arguments of {call.function.name} are no JSON"
        raise ApiError(400, text, param="messages") from error
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
