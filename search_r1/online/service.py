"""What an adapter says of its service: how a request is built and how an answer is read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from search_r1.search.schema import well_formed

Json = Any
MOST_RESULTS = 100
"""Of an answer; no service has half as many."""
NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class Credentials:
    """What the environment holds for a service; only requests ever carry it."""

    key: str = field(repr=False)
    setting: str = field(default="", repr=False)
    """A second value that a service wants: Google's search engine id."""


@dataclass(frozen=True)
class Ask:
    """One request: `count` results of `query`, `page` (from 0) of pages of that size."""

    query: str
    count: int
    page: int = 0


@dataclass(frozen=True)
class Call:
    """An HTTP request without its address: GET with `params`, POST if there is a `body`."""

    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Mapping[str, Json] | None = None


@dataclass(frozen=True)
class Found:
    """A result: its page, title and snippet, and the service's own score if it gives one."""

    url: str
    title: str
    snippet: str
    score: float | None = None


@dataclass(frozen=True)
class Service:
    """A row of the table of services."""

    name: str
    url: str
    key_variable: str
    """The environment variable with the key."""
    most_per_request: int
    most: int
    """Results that can be had for a query over all its pages."""
    build: Callable[[Credentials, Ask], Call]
    read: Callable[[Json], list[Found]]
    """Raises KeyError, TypeError or AttributeError for an answer outside the documented form."""
    setting_variable: str | None = None
    spent: re.Pattern[str] = NEVER
    """In a 429: the quota is used up, asking again is useless."""
    busy: re.Pattern[str] = NEVER
    """In another 4xx: a limit of rate all the same, asking again helps."""
    most_chars: int = 2048
    most_words: int = 1000
    """Longer queries are cut at a word, since the service would refuse them."""

    def shorten(self, query: str) -> str:
        """`query` on one line, cut at a word to what the service takes."""
        words = well_formed(query).split()[: self.most_words]
        text = " ".join(words)
        if len(text) <= self.most_chars:
            return text
        head, space, _ = text[: self.most_chars + 1].rpartition(" ")
        return head if space else text[: self.most_chars]

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that it needs."""
        return tuple(v for v in (self.key_variable, self.setting_variable) if v is not None)


def text_of(item: Mapping[str, Json], name: str) -> str:
    """The text of a field on one line, "" where it is absent; raises TypeError for other types."""
    value = item.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected text")
    return " ".join(well_formed(value).split())


def read_items(items: Json, url: str, title: str, snippet: str) -> list[Found]:
    """Results of a list of objects whose fields have these names; those without address go."""
    if not isinstance(items, list):
        raise TypeError(f"the results are {type(items).__name__}, expected a list")
    known = items[:MOST_RESULTS]
    found = [Found(text_of(i, url), text_of(i, title), text_of(i, snippet)) for i in known]
    return [result for result in found if result.url]
