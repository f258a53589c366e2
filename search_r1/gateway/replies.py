"""What a loop gets for a sampled turn: a message with tool calls, whole or in deltas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_r1.agent_server.streaming import num_undecided
from verl.agent.interface import ToolCall
from verl.agent.native import CALL, PYTHON_TAG, NativeFormat
from verl.types import Completion


@dataclass(frozen=True)
class Answered:
    """A sampled turn as a message."""

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    number: int
    """Number of the turn in the episode."""

    @property
    def canonical(self) -> Mapping[str, Any]:
        """The message as `read_messages` reads it when the loop sends it again."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.tool, "arguments": c.arguments}}
                for c in self.calls
            ]
        return message

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's format."""
        return [
            {
                "id": f"call_{self.number}_{place}",
                "type": "function",
                "function": {
                    "name": call.tool,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for place, call in enumerate(self.calls)
        ]

    @property
    def message(self) -> dict[str, Any]:
        """The message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.tool_calls}
        return message


def answered(
    completion: Completion, format: NativeFormat, ends: Iterable[str], stop: Sequence[str],
    has_tools: bool, number: int,
) -> Answered:  # fmt: skip
    """Read a completion as a message; calls are parsed if the request had tools.

    `ends`: texts of tokens that end a turn; one of them, or the stop string, ends the completion
    and is not part of the content. With calls, the content is what stands before them.
    """
    text = completion.text
    if completion.finish_reason != "length":
        text = without_end(text, (*stop, *ends))
    calls = format.parse(completion).calls if has_tools else ()
    reason = "length" if completion.finish_reason == "length" else "stop"
    if calls:
        return Answered(text_before_calls(text), calls, "tool_calls", number)
    return Answered(text, (), reason, number)


def without_end(text: str, ends: Iterable[str]) -> str:
    """Return the text without the first of `ends` that it ends with."""
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def text_before_calls(text: str) -> str:
    """Return what stands before the first call; nothing before a bare JSON object."""
    before, opening, _ = text.partition(CALL.opening)
    return before if opening else ""


class Deltas:
    """Cuts a text that arrives in pieces into what can be sent already.

    What may turn out to be a call, a stop string or the end of the turn is kept back.
    """

    def __init__(self, marks: Sequence[str], has_tools: bool) -> None:
        self.marks = [mark for mark in (*marks, *([CALL.opening] if has_tools else ())) if mark]
        self.has_tools = has_tools
        self.text = ""
        self.num_sent = 0

    def feed(self, piece: str) -> str:
        """Add a piece; return the content that can be sent."""
        self.text += piece
        start = self.text.lstrip()
        may_be_bare = start.startswith(("{", PYTHON_TAG[: len(start)]))
        if self.has_tools and may_be_bare:
            return ""
        return self._until(self._num_certain())

    def finish(self, content: str) -> str:
        """Return the rest of the turn's content."""
        sent = self.text[: self.num_sent]
        assert content.startswith(sent), "what was streamed is the beginning of the content"
        return content[self.num_sent :]

    def _until(self, end: int) -> str:
        piece = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return piece

    def _num_certain(self) -> int:
        """Return the number of characters before any mark, or what may be the start of one."""
        first, text = self.num_sent, self.text
        found = [place for mark in self.marks if (place := text.find(mark, first)) >= 0]
        end = min(found, default=len(text))
        return end - num_undecided(text[first:end], self.marks)
