"""The tags of a dialogue, as data: what agent and rewards both read. Plain text, nothing imported.

A tag dialogue ends turns at `Grammar.stop` and reads actions; rewards look for the answer and check
the form. Both follow the grammar they are given, so that a format may bring tags of its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tag:
    """What opens and what closes one part of a dialogue."""

    opening: str
    closing: str

    def wrap(self, text: str) -> str:
        """The text between the two."""
        return f"{self.opening}{text}{self.closing}"


@dataclass(frozen=True)
class Grammar:
    """The tags of a dialogue, and where a call of a tool may stand."""

    think: Tag = Tag("<think>", "</think>")
    tools: tuple[tuple[str, Tag], ...] = ()
    """Names of tools, each with the tag whose content is a call."""
    information: Tag = Tag("<information>", "</information>")
    """What the environment puts around what a call brought."""
    answer: Tag = Tag("<answer>", "</answer>")
    acts_in_think: bool = False
    """Calls are part of the thinking, rather than between two parts of it."""

    def with_tools(self, names: Iterable[str]) -> Grammar:
        """The grammar for these tools: its own tag of each, or else `<name>` and `</name>`."""
        own = dict(self.tools)
        named = ((name, own.get(name) or Tag(f"<{name}>", f"</{name}>")) for name in names)
        return replace(self, tools=tuple(named))

    def tool(self, name: str) -> Tag:
        """The tag of a tool. Raises KeyError for one that the grammar does not have."""
        return dict(self.tools)[name]

    @property
    def calls(self) -> tuple[Tag, ...]:
        """The tags of all tools."""
        return tuple(tag for _, tag in self.tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a policy turn."""
        return tuple(tag.closing for tag in (*self.calls, self.answer))

    @property
    def tags(self) -> tuple[Tag, ...]:
        return self.think, *self.calls, self.information, self.answer


def _content(tag: Tag, name: str) -> str:
    """The tag around the group `name`; an opening that is never closed swallows no later one."""
    opening, closing = re.escape(tag.opening), re.escape(tag.closing)
    return f"{opening}(?P<{name}>(?:(?!{opening}).)*?){closing}"


@functools.cache
def answer_pattern(tags: Grammar) -> re.Pattern[str]:
    """A complete answer; its group `answer` is the content."""
    return re.compile(_content(tags.answer, "answer"), re.DOTALL)


@functools.cache
def action_pattern(tags: Grammar) -> re.Pattern[str]:
    """A complete call or answer; group `toolN` is the content of a call of tool N of `tags.tools`,
    group `answer` that of an answer."""
    calls = (_content(tag, f"tool{number}") for number, tag in enumerate(tags.calls))
    return re.compile("|".join((*calls, _content(tags.answer, "answer"))), re.DOTALL)


@functools.cache
def information_pattern(tags: Grammar) -> re.Pattern[str]:
    """What stands between information tags, as group 1."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    return re.compile(f"{opening}(.*){closing}", re.DOTALL)


@functools.cache
def think_ending_patterns(tags: Grammar) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A text that ends with a thinking part that is empty, and one that ends with one open."""
    opening, closing = re.escape(tags.think.opening), re.escape(tags.think.closing)
    return re.compile(rf"{opening}\s*{closing}\s*\Z"), re.compile(rf"{opening}\s*\Z")


def has_broken_tags(text: str, tags: Grammar) -> bool:
    """Whether one turn's tags do not pair up.

    A part may not be opened within itself, closed without being open, or left open, and documents
    are not the policy's to write. Thinking alone may come from an earlier turn or the prompt, and
    go on into the next.
    """
    for tag in tags.tags:
        marks = re.findall(f"{re.escape(tag.opening)}|{re.escape(tag.closing)}", text)
        order = "".join("(" if mark == tag.opening else ")" for mark in marks)
        if not re.fullmatch(_orders(tags)[tag], order):
            return True
    return False


@functools.cache
def _orders(tags: Grammar) -> dict[Tag, str]:
    """In what order the openings and closings of each tag may stand in one turn."""
    pairs = r"(\(\))*"
    return {
        tags.think: rf"\)?{pairs}\(?",
        **dict.fromkeys(tags.calls, pairs),
        tags.information: "",
        tags.answer: pairs,
    }


@functools.cache
def tag_pattern(tags: Grammar) -> re.Pattern[str]:
    """Any opening or closing, as group 1."""
    texts = (text for tag in tags.tags for text in (tag.opening, tag.closing))
    return re.compile(f"({'|'.join(map(re.escape, texts))})")
