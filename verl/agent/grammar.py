"""The tags of a dialogue as data, shared by the agent and the rewards.

A tag dialogue ends turns at `Grammar.stop` and parses actions; rewards look for the answer and
check the format. Both use the grammar that they are given, so that a format can define its own
tags. This module works on plain text and imports nothing else of the project.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tag:
    """The opening and closing text of one part of a dialogue."""

    opening: str
    closing: str

    def wrap(self, text: str) -> str:
        """Return `text` enclosed in the tag."""
        return f"{self.opening}{text}{self.closing}"


@dataclass(frozen=True)
class Grammar:
    """The tags of a dialogue, and where tool calls may be made."""

    think: Tag = Tag("<think>", "</think>")
    tools: tuple[tuple[str, Tag], ...] = ()
    """Tool names, each with the tag that encloses a call."""
    information: Tag = Tag("<information>", "</information>")
    """Encloses the results of tools."""
    answer: Tag = Tag("<answer>", "</answer>")
    acts_in_think: bool = False
    """Whether calls are made inside a thinking part rather than between two of them."""
    ends_at_eos: bool = False
    """Whether every turn, of one or more calls, ends with the text of an end of sequence."""

    def with_tools(self, names: Iterable[str]) -> Grammar:
        """Return the grammar for these tools; the default tag of a tool is `<name>`, `</name>`."""
        own = dict(self.tools)
        tools = ((name, own.get(name) or Tag(f"<{name}>", f"</{name}>")) for name in names)
        return replace(self, tools=tuple(tools))

    def tool(self, name: str) -> Tag:
        """Return the tag of a tool. Raises KeyError for an unknown tool."""
        return dict(self.tools)[name]

    @property
    def calls(self) -> tuple[Tag, ...]:
        """The tags of all tools."""
        return tuple(tag for _, tag in self.tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a policy turn."""
        return tuple(tag.closing for tag in (*self.calls, self.answer))

    @property
    def tags(self) -> tuple[Tag, ...]:
        return self.think, *self.calls, self.information, self.answer


def _content(tag: Tag, name: str) -> str:
    """Return a pattern of the tag with its content as group `name`."""
    opening, closing = re.escape(tag.opening), re.escape(tag.closing)
    # The content does not contain the opening again, so an unclosed opening is skipped.
    return f"{opening}(?P<{name}>(?:(?!{opening}).)*?){closing}"


@functools.cache
def answer_pattern(tags: Grammar) -> re.Pattern[str]:
    """Return the pattern of a complete answer, with its content as group `answer`."""
    return re.compile(_content(tags.answer, "answer"), re.DOTALL)


@functools.cache
def action_pattern(tags: Grammar) -> re.Pattern[str]:
    """Return the pattern of a complete call or answer.

    Group `toolN` is the content of a call of `tags.tools[N]`, group `answer` that of an answer.
    """
    calls = (_content(tag, f"tool{number}") for number, tag in enumerate(tags.calls))
    return re.compile("|".join((*calls, _content(tags.answer, "answer"))), re.DOTALL)


def spans_between(text: str, tag: Tag) -> Iterator[tuple[int, int]]:
    """Yield start and end of each content of a tag, up to the first closing after the opening.

    Linear, where the pattern `opening(.*?)closing` scans to the end from every unclosed opening.
    """
    end = -len(tag.closing)
    while True:
        start = text.find(tag.opening, end + len(tag.closing))
        end = text.find(tag.closing, start + len(tag.opening)) if start >= 0 else -1
        if end < 0:
            return
        yield start + len(tag.opening), end


def find_information(text: str, tags: Grammar) -> str | None:
    """Return the text from the first information tag to the last closing one; None without both.

    This takes linear time; a pattern would start again at every opening.
    """
    opening, closing = tags.information.opening, tags.information.closing
    start, end = text.find(opening), text.rfind(closing)
    return text[start + len(opening) : end] if 0 <= start <= end - len(opening) else None


@functools.cache
def think_ending_patterns(tags: Grammar) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a text ending with an empty, or a just opened, thinking part."""
    opening, closing = re.escape(tags.think.opening), re.escape(tags.think.closing)
    return re.compile(rf"{opening}\s*{closing}\s*\Z"), re.compile(rf"{opening}\s*\Z")


def has_broken_tags(text: str, tags: Grammar) -> bool:
    """Whether the tags of one turn are unbalanced.

    A part must not be nested in itself, closed without being open, or left open, and the policy
    must not write information parts. Only a thinking part may have been opened in the prompt or an
    earlier turn, and may continue in the next turn.
    """
    for tag in tags.tags:
        found = re.findall(f"{re.escape(tag.opening)}|{re.escape(tag.closing)}", text)
        brackets = "".join("(" if part == tag.opening else ")" for part in found)
        if not re.fullmatch(_allowed_brackets(tags)[tag], brackets):
            return True
    return False


@functools.cache
def _allowed_brackets(tags: Grammar) -> dict[Tag, str]:
    """Return, for each tag, a pattern of its openings `(` and closings `)` allowed in a turn."""
    pairs = r"(\(\))*"
    return {
        tags.think: rf"\)?{pairs}\(?",
        **dict.fromkeys(tags.calls, pairs),
        tags.information: "",
        tags.answer: pairs,
    }


@functools.cache
def tag_pattern(tags: Grammar) -> re.Pattern[str]:
    """Return the pattern of any opening or closing text, as group 1."""
    texts = (text for tag in tags.tags for text in (tag.opening, tag.closing))
    return re.compile(f"({'|'.join(map(re.escape, texts))})")
