"""The tags of a dialogue, as data: what agent and rewards both read. Plain text, nothing imported.

The agent ends turns at `Grammar.stop` and reads actions; rewards look for the answer and check the
form. Both follow the grammar they are given, so that a template may bring tags of its own.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


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
    """The tags of a dialogue, and where a search may stand."""

    think: Tag = Tag("<think>", "</think>")
    search: Tag = Tag("<search>", "</search>")
    information: Tag = Tag("<information>", "</information>")
    """What the environment puts around documents."""
    answer: Tag = Tag("<answer>", "</answer>")
    searches_in_think: bool = False
    """Searches are part of the thinking, rather than between two parts of it."""

    @property
    def stop(self) -> tuple[str, str]:
        """What ends a policy turn."""
        return self.search.closing, self.answer.closing

    @property
    def tags(self) -> tuple[Tag, ...]:
        return self.think, self.search, self.information, self.answer


SEARCH_R1 = Grammar()
"""Search-R1 (Jin et al. 2025): think, search, information, think again, answer."""

R1_SEARCHER = Grammar(
    search=Tag("<|begin_of_query|>", "<|end_of_query|>"),
    information=Tag("<|begin_of_documents|>", "<|end_of_documents|>"),
    searches_in_think=True,
)
"""R1-Searcher (Song et al. 2025): one thinking part that holds all searches, then the answer."""


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
    """A complete search or answer; the group of that name is the content."""
    either = _content(tags.search, "search"), _content(tags.answer, "answer")
    return re.compile("|".join(either), re.DOTALL)


@functools.cache
def information_pattern(tags: Grammar) -> re.Pattern[str]:
    """What stands between information tags, as group 1."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    return re.compile(f"{opening}(.*){closing}", re.DOTALL)


@functools.cache
def handover_patterns(tags: Grammar) -> tuple[re.Pattern[str], re.Pattern[str]]:
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
        tags.search: pairs,
        tags.information: "",
        tags.answer: pairs,
    }


@functools.cache
def tag_pattern(tags: Grammar) -> re.Pattern[str]:
    """Any opening or closing, as group 1."""
    texts = (text for tag in tags.tags for text in (tag.opening, tag.closing))
    return re.compile(f"({'|'.join(map(re.escape, texts))})")
