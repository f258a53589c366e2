"""Streams a dialogue as server-sent events, and cancels it if the client disconnects.

The streamed reasoning excludes think tags, control tokens, and the search or answer that ends a
turn, since searches and answers have separate fields. Text is sent as soon as it cannot be part of
such a tag any more.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request

from search_r1.agent_server.responses import (
    INTERNAL,
    ApiError,
    Envelope,
    finish_reason,
    search_r1_field,
    usage,
)
from search_r1.inference.dialogue import DialogueListener, Reply, Search, search_json
from verl.agent.grammar import Grammar, action_pattern
from verl.errors import AnswerInvalid, UserError
from verl.types import Status


class ReasoningFilter:
    """Extracts the reasoning to show from a dialogue's turns, incrementally."""

    def __init__(self, tags: Grammar, special_tokens: Iterable[str] = ()) -> None:
        """`special_tokens`: control tokens of the policy's tokenizer, which are hidden."""
        self._action = action_pattern(tags)
        self._openings = tuple(tag.opening for tag in (*tags.calls, tags.answer))
        hidden = [tags.think.opening, tags.think.closing, *filter(None, special_tokens)]
        self._hidden = re.compile("|".join(map(re.escape, hidden)))
        self._marks = (*self._openings, *hidden)
        self._turn = ""
        self._num_shown = 0
        self._has_earlier_text = False
        self.call: str | None = None
        """The last turn's call, "" if it is not a plain query; None without one."""

    def feed(self, text: str) -> str:
        """Add text of the current turn and return the reasoning that can be shown now."""
        self._turn += text
        starts = [self._turn.find(tag) for tag in self._openings if tag in self._turn]
        end = min(starts) if starts else len(self._turn) - num_undecided(self._turn, self._marks)
        return self._new_part(self._turn[:end])

    def end_turn(self) -> str:
        """Return the rest of the turn's reasoning, without its complete search or answer."""
        self.call = self._call()
        shown = self._new_part(self._action.sub("", self._turn, count=1))
        self._has_earlier_text = self._has_earlier_text or self._num_shown > 0
        self._turn, self._num_shown = "", 0
        return shown

    def _call(self) -> str | None:
        action = self._action.search(self._turn)
        if action is None or action["answer"] is not None:
            return None
        words = action[action.lastindex or 0].strip()
        return "" if words.startswith(("{", "[")) else words

    def _new_part(self, text: str) -> str:
        """Return the part of `text` that is new; a blank line separates turns."""
        clean = self._hidden.sub("", text).strip()
        new = clean[self._num_shown :]
        separator = "\n\n" if new and not self._num_shown and self._has_earlier_text else ""
        self._num_shown += len(new)
        return separator + new


def num_undecided(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the end that may be the start of a mark, such as a tag."""
    tail = text[-max(map(len, marks), default=0) :]
    near = [mark for mark in marks if mark[0] in tail]  # hardly ever any, of hundreds of tokens
    for count in range(min(len(tail), max(map(len, near), default=1) - 1), 0, -1):
        if any(mark.startswith(tail[-count:]) for mark in near):
            return count
    return 0


def extract_reasoning(turns: Iterable[str], reasoning: ReasoningFilter) -> str:
    """Return the reasoning of a finished dialogue with a new filter."""
    return "".join(reasoning.feed(turn) + reasoning.end_turn() for turn in turns)


T = TypeVar("T")
Delta = Mapping[str, Any]
DONE = "data: [DONE]\n\n"


class StreamListener(DialogueListener):
    """Converts dialogue events into a queue of stream deltas."""

    def __init__(self, reasoning: ReasoningFilter, includes_documents: bool = False) -> None:
        self._reasoning, self._includes_documents = reasoning, includes_documents
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

    def said(self, text: str) -> None:
        self._put_reasoning(self._reasoning.feed(text))

    def turned(self) -> None:
        self._put_reasoning(self._reasoning.end_turn())
        if self._includes_documents and (query := self._reasoning.call) is not None:
            self._deltas.put_nowait({"search_r1": {"searches": [], "searching": query}})

    def searched(self, search: Search) -> None:
        body = search_json(search, self._includes_documents)
        self._deltas.put_nowait({"search_r1": {"searches": [body]}})

    def close(self) -> None:
        self._deltas.put_nowait(None)

    async def next(self) -> Delta | None:
        """Wait for the next delta; None after the last one."""
        return await self._deltas.get()

    def _put_reasoning(self, text: str) -> None:
        if text:
            self._deltas.put_nowait({"reasoning_content": text})


async def wait_for_reply(dialogue: asyncio.Task[Reply]) -> Reply:
    """Wait until the dialogue ends. Raises ApiError if the engine or a search failed."""
    try:
        reply = await dialogue
    except UserError as error:
        status = 502 if isinstance(error, AnswerInvalid) else 503
        raise ApiError(status, str(error), "engine_unavailable") from error
    if reply.status is Status.FAILED:
        raise ApiError(503, f"the retriever failed: {reply.error}", "retriever_unavailable")
    return reply


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` and return its result; if the client disconnects, cancel it and return None."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def events(
    envelope: Envelope,
    first: Delta | None,
    listener: StreamListener,
    dialogue: asyncio.Task[Reply],
    includes_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events: role, `first` and further deltas, answer, end, usage; or an error."""
    try:
        yield event(envelope.chunk({"role": "assistant", "content": ""}))
        delta = first
        while delta is not None:
            yield event(envelope.chunk(delta))
            delta = await listener.next()
        reply = await wait_for_reply(dialogue)
        if reply.answer:
            yield event(envelope.chunk({"content": reply.answer}))
        yield event(envelope.chunk({"search_r1": search_r1_field(reply)}, finish_reason(reply)))
        if includes_usage:
            yield event(envelope.usage_chunk(usage(reply)))
        yield DONE
    except ApiError as error:
        yield event(error.body())
    except Exception:  # a bug: the status was sent before, so the stream itself tells the client
        yield event(INTERNAL.body())
        raise  # to the server's log
    finally:
        dialogue.cancel()


def event(body: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
