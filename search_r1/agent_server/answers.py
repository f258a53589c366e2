"""The bodies of answers: whole completions, chunks of a stream, and what ours add to them.

Ours: `reasoning_content`, and `search_r1` with searches, status, turns and the number of tokens of
what was read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from search_r1.inference.dialogue import Reply, search_json
from verl.types import Origin, Status


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, reply: Reply, reasoning: str) -> dict[str, Any]:
        """The whole answer."""
        message = {
            "role": "assistant",
            "content": reply.answer or "",
            "reasoning_content": reasoning,
            "search_r1": facts(reply),
        }
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(reply)}
        return self._wrap("chat.completion", [choice]) | {"usage": usage(reply)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        """A part of a stream."""
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish}
        return self._wrap("chat.completion.chunk", [choice])

    def usage_chunk(self, reply: Reply) -> dict[str, Any]:
        """The last part of a stream whose client wants to count."""
        return self._wrap("chat.completion.chunk", []) | {"usage": usage(reply)}

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        shared = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return shared | {"choices": choices}


def facts(reply: Reply) -> dict[str, Any]:
    """How the answer came about."""
    return {
        "searches": [search_json(search) for search in reply.searches],
        "status": reply.status.value,
        "turns": len(reply.turns),
        "observation_tokens": reply.trajectory.num_tokens_of(Origin.OBSERVATION),
    }


def finish_reason(reply: Reply) -> str:
    """`length` for a dialogue that used up its turns or tokens without an answer."""
    return "stop" if reply.status is Status.ANSWERED else "length"


def usage(reply: Reply) -> dict[str, int]:
    """Tokens of the request and of the policy; what was read in between is counted apart."""
    prompt = reply.trajectory.num_tokens_of(Origin.PROMPT)
    sampled = reply.trajectory.num_policy_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
