"""Tag dialogues: `<tool>arguments</tool>` calls a tool, `<answer>…</answer>` ends the dialogue.

A policy turn ends at the first closing tag of a tool or an answer. A `TagFormat` defines the tags
and the texts for the policy. This module works on text and does not depend on tokens or engines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from verl.agent.control import break_strings
from verl.agent.grammar import Grammar, action_pattern, has_broken_tags
from verl.agent.interface import Item, Tool, ToolCall, Turn
from verl.types import Completion


class Passage(Protocol):
    """A tool's item or a document, which can be shown to the policy."""

    @property
    def text(self) -> str: ...

    @property
    def title(self) -> str | None: ...

    @property
    def id(self) -> str | None: ...


ITEM_WITH_ID = 'Doc {rank}(Title: "{title}", id: {id}) {text}\n'


@dataclass(frozen=True)
class TagFormat:
    """A `DialogueFormat` defined by its texts and tags."""

    name: str
    instruction: str
    """The user's message; `{question}` is replaced by the question."""
    invalid_action: str
    """Feedback after a turn without a valid action."""
    tags: Grammar
    item: str = 'Doc {rank}(Title: "{title}") {text}\n'
    """Text of an item with a title; `{rank}` counts from 1, `{id}` is the item's id."""
    untitled_item: str = "{text}\n"
    """Text of an item without a title."""
    separator: str = ""
    """Text between two items."""
    around: str = "\n\n{information}\n\n"
    """Text of an observation; `{information}` is replaced by the items in information tags."""

    @property
    def stop(self) -> tuple[str, ...]:
        return self.tags.stop

    @property
    def closed_think(self) -> str:
        return self.tags.think.wrap("\n") + "\n"

    @property
    def acts_in_think(self) -> bool:
        return self.tags.acts_in_think

    @property
    def schemas(self) -> tuple[()]:
        """Empty: the instruction describes the tags."""
        return ()

    def with_tools(self, names: Iterable[str]) -> TagFormat:
        """Return the format for a dialogue with these tools."""
        return replace(self, tags=self.tags.with_tools(names))

    def user_prompt(self, question: str) -> str:
        """Return the user's message for a question."""
        return self.instruction.replace("{question}", question.strip())

    def parse(self, completion: Completion) -> Turn:
        """Parse a turn; one without an action is malformed as well. See `DialogueFormat.parse`."""
        turn = read_turn(completion.text, self.tags)
        if has_broken_tags(completion.text, self.tags):
            return replace(turn, is_malformed=True)
        return turn

    def respond(
        self, turn: Turn, results: Sequence[Sequence[Item]] | None, reserved: Sequence[str]
    ) -> str:
        """Return the observation, or the feedback; see `DialogueFormat.respond`."""
        if results is None:
            return self.invalid_action
        return self.observation([item for items in results for item in items], reserved)

    def observation(self, passages: Sequence[Passage], reserved: Sequence[str] = ()) -> str:
        """Return the text of the passages in information tags; tags in them are neutralized.

        `reserved`: other strings to neutralize (`verl.agent.control.control_strings`).
        """
        information = self.tags.information.wrap(self.items_text(passages, reserved))
        return self.around.replace("{information}", information)

    def items_text(self, passages: Sequence[Passage], reserved: Sequence[str] = ()) -> str:
        """Return the text of the passages without information tags, neutralized likewise."""
        return self.separator.join(
            self._item_text(rank, passage, reserved) for rank, passage in enumerate(passages, 1)
        )

    def _item_text(self, rank: int, passage: Passage, reserved: Sequence[str]) -> str:
        values = {"rank": str(rank), "text": neutralize(passage.text, self.tags, reserved).strip()}
        if passage.title is None:
            return _fill(self.untitled_item, **values)
        values["title"] = neutralize(passage.title, self.tags, reserved)
        values["id"] = neutralize(passage.id or "", self.tags, reserved)
        return _fill(self.item, **values)


def plain_format(tools: Sequence[Tool]) -> TagFormat:
    """Return a format generated from the descriptions of the tools."""
    tags = Grammar().with_tools(tool.name for tool in tools)
    uses = "".join(
        f"- {tags.tool(tool.name).wrap(f' {tool.main_argument} ')}: {tool.description}\n"
        for tool in tools
    )
    names = " or ".join(tags.tool(tool.name).wrap("…") for tool in tools)
    calls = f"To use a tool, I have to write {names}. " if tools else ""
    return TagFormat(
        name="tools",
        instruction=(
            "Answer the question below. Think between <think> and </think>. These tools may help; "
            "what one brings will be given to you between <information> and </information>:\n"
            f"{uses}Write just the final answer between <answer> and </answer>. "
            "Question: {question}\n"
        ),
        invalid_action=(
            f"\n\nThat was not a valid action. {calls}To answer, I have to write the final answer "
            "between <answer> and </answer>. I will try once more.\n\n"
        ),
        tags=tags,
        item=ITEM_WITH_ID if any(tool.shows_ids for tool in tools) else TagFormat.item,
    )


def read_turn(text: str, tags: Grammar) -> Turn:
    """Parse the first closed call or answer of a policy turn; malformed if there is none.

    An empty call is ignored; an empty answer is an answer (and never correct).
    *Example*: `"<think> a </think> <clock> b </clock>"` calls the tool `clock` with `"b"`.
    """
    action = next(action_pattern(tags).finditer(text), None)
    if action is None:
        return Turn(is_malformed=True)
    if action["answer"] is not None:
        return Turn(answer=action["answer"].strip())
    for number, (name, _) in enumerate(tags.tools):
        content = (action[f"tool{number}"] or "").strip()
        if content:
            return Turn((ToolCall(name, content),))
    return Turn(is_malformed=True)


def neutralize(text: str, tags: Grammar, reserved: Sequence[str] = ()) -> str:
    """Insert a space into every tag, control token and string of `reserved`, to disable them.

    Since characters are only added, no new tag can arise.
    *Example*: `"<answer>x"` becomes `"< answer>x"`.
    """
    pattern, other_tags = _reserved(tags)
    strings = (*other_tags, *reserved) if other_tags else reserved  # whose patterns are built
    return break_strings(pattern.sub("< ", text), strings)


@functools.cache
def _reserved(tags: Grammar) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return a pattern of each `<` to neutralize, and the tags that are not like `<name>`."""
    texts = [text for tag in tags.tags for text in (tag.opening, tag.closing)]
    matches = [re.fullmatch(r"</?(\w+)>", text) for text in texts]
    names = "|".join(dict.fromkeys(re.escape(match[1]) for match in matches if match))
    pattern = re.compile(
        rf"<(?=/?\s*(?:{names})\b"
        r"|\|"  # this and the next: control tokens of common chat formats
        r"|/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)>)",
        re.IGNORECASE,
    )
    other_tags = (text for text, match in zip(texts, matches, strict=True) if not match)
    return pattern, tuple(text for text in other_tags if not text.startswith("<|"))


def _fill(pattern: str, **values: str) -> str:
    """Replace each `{name}` in one pass, so that braces in a value are left alone."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), pattern)
