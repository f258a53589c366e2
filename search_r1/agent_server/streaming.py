"""A dialogue as server-sent events while it happens, and one that ends when its client leaves.

A client is shown the policy's reasoning without thinking tags, control tokens and the search or
answer that ends a turn, for which it has fields of their own. Text is given as soon as it cannot
turn out to be such a tag.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request

from search_r1.agent_server.answers import INTERNAL, ApiError, Envelope, facts, finish_reason
from search_r1.inference.dialogue import DialogueListener, Reply, Search, search_json
from verl.agent.grammar import Grammar, action_pattern
from verl.errors import AnswerInvalid, UserError
from verl.types import Status


class Thoughts:
    """The reasoning of one dialogue, turn by turn."""

    def __init__(self, tags: Grammar, special_tokens: Iterable[str] = ()) -> None:
        """`special_tokens` are control tokens of the policy's tokenizer, which nobody wants."""
        self._action = action_pattern(tags)
        self._openings = tuple(tag.opening for tag in (*tags.calls, tags.answer))
        hidden = [tags.think.opening, tags.think.closing, *filter(None, special_tokens)]
        self._hidden = re.compile("|".join(map(re.escape, hidden)))
        self._marks = (*self._openings, *hidden)
        self._turn, self._told, self._is_later = "", 0, False

    def say(self, text: str) -> str:
        """What can be shown now that the policy has said `text`."""
        self._turn += text
        places = [at for at in (self._turn.find(tag) for tag in self._openings) if at >= 0]
        end = min(places) if places else len(self._turn) - self._num_undecided()
        return self._show(self._turn[:end])

    def end_turn(self) -> str:
        """What else is to be shown of this turn, whose search or answer is complete."""
        shown = self._show(self._action.sub("", self._turn, count=1))
        self._is_later = self._is_later or self._told > 0
        self._turn, self._told = "", 0
        return shown

    def _show(self, text: str) -> str:
        """What of `text` was not given yet; an empty line parts the turns."""
        clean = self._hidden.sub("", text).strip()
        new = clean[self._told :]
        between = "\n\n" if new and not self._told and self._is_later else ""
        self._told += len(new)
        return between + new

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a tag."""
        longest = max(map(len, self._marks)) - 1
        for count in range(min(longest, len(self._turn)), 0, -1):
            if any(mark.startswith(self._turn[-count:]) for mark in self._marks):
                return count
        return 0


def reasoning(turns: Iterable[str], tags: Grammar, special_tokens: Iterable[str] = ()) -> str:
    """The reasoning of a finished dialogue."""
    thoughts = Thoughts(tags, special_tokens)
    return "".join(part for turn in turns for part in (thoughts.say(turn), thoughts.end_turn()))


logger = logging.getLogger(__name__)

T = TypeVar("T")
Delta = Mapping[str, Any]
DONE = "data: [DONE]\n\n"


class Listener(DialogueListener):
    """Turns what is heard into deltas, for whoever iterates over them."""

    def __init__(self, thoughts: Thoughts, includes_documents: bool = False) -> None:
        self._thoughts, self._includes_documents = thoughts, includes_documents
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

    def said(self, text: str) -> None:
        self._reason(self._thoughts.say(text))

    def turned(self) -> None:
        self._reason(self._thoughts.end_turn())

    def searched(self, search: Search) -> None:
        told = search_json(search, self._includes_documents)
        self._deltas.put_nowait({"search_r1": {"searches": [told]}})

    def close(self) -> None:
        self._deltas.put_nowait(None)

    async def next(self) -> Delta | None:
        return await self._deltas.get()

    def _reason(self, text: str) -> None:
        if text:
            self._deltas.put_nowait({"reasoning_content": text})


async def outcome(work: asyncio.Task[Reply]) -> Reply:
    """The reply of a dialogue; raises ApiError for whatever went wrong with it."""
    try:
        reply = await work
    except UserError as error:
        status = 502 if isinstance(error, AnswerInvalid) else 503
        raise ApiError(status, str(error), "engine_unavailable") from error
    if reply.status is Status.FAILED:
        raise ApiError(503, f"the retriever failed: {reply.error}", "retriever_unavailable")
    return reply


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, if the client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for either in (task, leaving):
            either.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def events(
    envelope: Envelope,
    first: Delta | None,
    listener: Listener,
    work: asyncio.Task[Reply],
    includes_usage: bool,
) -> AsyncIterator[str]:
    """The stream: role, reasoning and searches, answer, end, usage; an error is its last."""
    try:
        yield _event(envelope.chunk({"role": "assistant", "content": ""}))
        delta = first
        while delta is not None:
            yield _event(envelope.chunk(delta))
            delta = await listener.next()
        reply = await outcome(work)
        if reply.answer:
            yield _event(envelope.chunk({"content": reply.answer}))
        yield _event(envelope.chunk({"search_r1": facts(reply)}, finish_reason(reply)))
        if includes_usage:
            yield _event(envelope.usage_chunk(reply))
        yield DONE
    except ApiError as error:
        yield _event(error.body())
    except Exception:
        yield _event(INTERNAL.body())
        raise
    finally:
        work.cancel()


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
