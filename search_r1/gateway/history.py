"""The requests of an episode as rows of tokens: those that were sampled stay as they were sampled.

Each sampled turn remembers the conversation that it ended. A request that continues one of them
continues its tokens: only the new messages are rendered. Any other request, as after an edit or a
summary of the history, begins a row of its own, which repeats what it has in common. A sampled
token is trained in one row only; in others, and wherever a loop wrote what it was not given, the
tokens are context. The rows of an episode share its outcome.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from search_r1.agent_server.responses import ApiError
from search_r1.gateway.messages import CompletionRequest
from search_r1.gateway.replies import Answered
from verl.agent.control import ControlStrings, control_strings
from verl.agent.dialogue import Tokenizer
from verl.agent.grammar import Grammar
from verl.agent.native import MARK
from verl.agent.tags import neutralize
from verl.data.outside import neutral_row, strings_of_rows
from verl.data.prompts import TEMPLATE_ERRORS, render
from verl.data.rows import Row
from verl.errors import DataError
from verl.types import Completion, Origin, Segment

Conversation = tuple[str, ...]
"""Messages as texts that are equal if the messages are."""


@dataclass(frozen=True)
class Renderer:
    """Writes messages by the model's chat template, as the native format does."""

    tokenizer: Any
    tags: Grammar
    """Tags of the run's format, which results of tools must not contain."""
    opening: str = ""
    """A closed thinking part before each turn (`algorithm.no_think_rl`)."""
    reserved: ControlStrings = field(init=False)
    of_rows: ControlStrings = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reserved", control_strings(self.tokenizer))
        object.__setattr__(self, "of_rows", strings_of_rows(self.tokenizer, self.tags))

    def first(self, asked: CompletionRequest) -> list[Segment]:
        """Return the prompt of a conversation. Raises ApiError if the template refuses it."""
        try:
            prompt = render(self._row(asked.messages), self.tokenizer, asked.tools)
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        if missing := [name for name in asked.tool_names if name not in prompt.text]:
            text = f"the model's chat template does not show the tool {missing[0]}"
            raise ApiError(400, f"{text}; fix: use a model with tools", param="tools")
        segments = [Segment(Origin.PROMPT, prompt.ids, prompt.text)]
        if self.opening:
            segments.append(self._encoded(Origin.PROMPT, self.opening))
        return segments

    def following(self, messages: Sequence[Mapping[str, Any]], end: str) -> Segment:
        """Return messages after a turn, which ended with `end`, up to the start of the next one."""
        turn = ({"role": "user", "content": "?"}, {"role": "assistant", "content": MARK})
        shown = [*turn, *self._neutral(messages)]
        try:
            text = str(self.tokenizer.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=True
            ))  # fmt: skip
        except TEMPLATE_ERRORS as error:
            text = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, text, param="messages") from error
        # What the policy sampled to end its turn is in its segment, and is not written twice.
        text = text.partition(MARK)[2].removeprefix(end)
        return self._encoded(Origin.OBSERVATION, text + self.opening)

    def _neutral(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return messages without control tokens, and results of tools without tags as well."""
        prompt = self._row(messages).prompt
        assert not isinstance(prompt, str), "messages stay messages"
        return prompt

    def _row(self, messages: Sequence[Mapping[str, Any]]) -> Row:
        shown = tuple(
            {**m, "content": neutralize(m["content"], self.tags, self.reserved)}
            if m["role"] == "tool"
            else m
            for m in messages
        )
        return neutral_row(Row("messages", 0, shown, "", ()), self.of_rows)

    def _encoded(self, origin: Origin, text: str) -> Segment:
        tokenizer: Tokenizer = self.tokenizer
        return Segment(origin, tuple(tokenizer.encode(text, add_special_tokens=False)), text)


@dataclass(eq=False)
class SampledTurn:
    """A turn, with all that stands before it."""

    conversation: Conversation
    tools: Conversation
    segments: tuple[Segment, ...]
    """The row up to the end of the turn."""
    end: str
    """The text of the token that ended it; empty if it ran out of tokens or met a stop string."""
    answer: Answered
    is_malformed: bool
    is_truncated: bool
    executed: Counter[str] = field(default_factory=Counter)
    """Number of results of each tool that the loop gave for the turn's calls."""
    is_continued: bool = False


@dataclass
class EpisodeHistory:
    """The sampled turns of an episode, in the order in which they were finished."""

    renderer: Renderer
    turns: list[SampledTurn] = field(default_factory=list)
    tool_names: dict[str, None] = field(default_factory=dict)
    """Every tool that a request had."""

    def context(self, asked: CompletionRequest) -> tuple[list[Segment], SampledTurn | None]:
        """Return the tokens to continue for a request, and the turn that they end with, if any."""
        self.tool_names |= dict.fromkeys(asked.tool_names)
        conversation, tools = key(asked.messages), key(asked.tools)
        before = [
            turn for turn in self.turns
            if turn.tools == tools
            and turn.conversation == conversation[: len(turn.conversation)]
        ]  # fmt: skip
        if not before:
            return self.renderer.first(asked), None
        turn = max(reversed(before), key=lambda turn: len(turn.conversation))
        new = asked.messages[len(turn.conversation) :]
        if not turn.executed:
            turn.executed.update(m["name"] for m in new if m["role"] == "tool")
        return [*turn.segments, self.renderer.following(new, turn.end)], turn

    def add(
        self, asked: CompletionRequest, context: Sequence[Segment], parent: SampledTurn | None,
        completion: Completion, answer: Answered, end: str, is_malformed: bool,
    ) -> None:  # fmt: skip
        """Record a sampled turn."""
        if parent is not None:
            parent.is_continued = True
        sampled = Segment(
            Origin.POLICY, completion.ids, completion.text, completion.log_probs,
            completion.weight_version,
        )  # fmt: skip
        self.turns.append(SampledTurn(
            key((*asked.messages, answer.canonical)), key(asked.tools), (*context, sampled), end,
            answer, is_malformed, completion.finish_reason == "length",
        ))  # fmt: skip

    def rows(self) -> list[list[Segment]]:
        """Return the rows of the episode, in the order of their last turns; each turn is in one.

        What a row has in common with one before it is a part of its prompt.
        """
        trained: set[int] = set()
        rows = []
        for turn in self.turns:
            if not turn.is_continued:
                rows.append([s.as_prompt() if id(s) in trained else s for s in turn.segments])
                trained |= {id(s) for s in turn.segments}
        return rows


def key(parts: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return messages or tools as texts that are equal if these are."""
    return tuple(json.dumps(part, sort_keys=True) for part in parts)
