"""One dumped dialogue, read for people: its turns, what was searched and found, what was answered.

Takes the rows of `verl.data.trajectories`, with ids and log-probs, and those of a validation, which
hold text only. Pure: no files.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_r1.agent.grammar import SEARCH_R1, Grammar
from search_r1.agent.tags import NAMES, PLAIN, named_format
from search_r1.rewards.interface import extract_answer
from search_r1.rewards.normalize import covers, matches_exactly
from verl.agent import native
from verl.agent.grammar import action_pattern
from verl.errors import UserError

Row = Mapping[str, Any]

POLICY, OBSERVATION = "policy", "observation"
QUESTION = "Question:"
END = re.compile(r"\n|<\|")
"""What a question in a prompt ends with: the line, or a token of the chat template."""
DOCUMENT = re.compile(
    r'^Doc \d+\(Title: "(?P<title>.*?)"(?:, id: (?P<id>[^)]*))?\) ?', re.MULTILINE
)
UNKNOWN = re.compile(r"<(\w+)>([^<]*)</\1>\s*\Z")
"""A call of a tool that the configuration does not name."""
MOST_QUESTION = 300
"""Characters of a prompt that stand for a question which cannot be told from it."""


@dataclass(frozen=True)
class Found:
    """A document that a search brought, as the policy read it."""

    title: str
    text: str
    id: str
    has_answer: bool


@dataclass(frozen=True)
class Search:
    """One call of a tool, and what came back."""

    tool: str
    query: str
    documents: tuple[Found, ...]
    segment: int
    """Which of the dialogue's segments holds the call."""


@dataclass(frozen=True)
class Dialogue:
    """What a row of a dump says, whichever kind of dump it is."""

    question: str
    answer: str | None
    gold: tuple[str, ...]
    searches: tuple[Search, ...]
    segments: tuple[Mapping[str, Any], ...]
    """`origin` and `text` of each; of a training trajectory also what is known of its tokens."""
    components: Mapping[str, float]

    @property
    def is_found(self) -> bool:
        """An accepted answer stands in some document."""
        return any(one.has_answer for search in self.searches for one in search.documents)

    @property
    def is_given(self) -> bool:
        """The answer is an accepted one."""
        return self.answer is not None and matches_exactly(self.answer, self.gold)


def tags_of(config: Row) -> Grammar:
    """The tags of a run's dialogues, by its `config.yaml`; Search-R1's where it does not say."""
    template = str(config.get("template") or NAMES[0])
    if template == native.NAME:
        return native.GRAMMAR
    tools = (config.get("agent") or {}).get("tools") or ["search"]
    try:
        tags = Grammar() if template == PLAIN else named_format(template).tags
    except UserError:  # a file that was moved since
        tags = SEARCH_R1
    return tags.with_tools(name for name in map(str, tools) if name.isidentifier())


def read_dialogue(row: Row, tags: Grammar) -> Dialogue:
    """A row of either kind. Raises KeyError, TypeError or AttributeError for something else."""
    is_whole = "segments" in row
    segments = tuple(row["segments"]) if is_whole else tuple(_cut(row["dialogue"], tags))
    gold = tuple(map(str, row["ground_truth"]))
    texts = [one["text"] for one in segments if one["origin"] == POLICY]
    # A validation's row has the parts of its reward beside the score.
    parts = {k: v for k, v in row.items() if isinstance(v, float) and k != "score"}
    return Dialogue(
        question=str(row.get("question") or _question(segments)),
        answer=extract_answer(texts, tags),
        gold=gold,
        searches=tuple(_searches(segments, tags, gold)),
        segments=segments,
        components=row["components"] if is_whole else parts,
    )


def _cut(text: str, tags: Grammar) -> Iterator[dict[str, str]]:
    """A dialogue that is text only, by what stands between information tags."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    for number, part in enumerate(re.split(f"({opening}.*?{closing})", text, flags=re.DOTALL)):
        if part:
            yield {"origin": OBSERVATION if number % 2 else POLICY, "text": part}


def _question(segments: Sequence[Row]) -> str:
    """The last question that the prompt words, or else the prompt's end."""
    prompt = "".join(one["text"] for one in segments if one["origin"] == "prompt")
    _, is_named, last = prompt.rpartition(QUESTION)
    return END.split(last.lstrip(), maxsplit=1)[0].strip() if is_named else prompt[-MOST_QUESTION:]


def _searches(segments: Sequence[Row], tags: Grammar, gold: Sequence[str]) -> Iterator[Search]:
    """Each call that was answered with information, from the turn before it."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    between = re.compile(f"{opening}(.*?){closing}", re.DOTALL)
    for place, (turn, after) in enumerate(itertools.pairwise(segments)):
        if turn["origin"] != POLICY or after["origin"] != OBSERVATION:
            continue
        brought = between.findall(after["text"])
        calls = list(_calls(turn["text"], tags)) or UNKNOWN.findall(turn["text"])
        for (tool, query), information in zip(calls[-len(brought) :], brought, strict=False):
            yield Search(tool, query, tuple(_documents(information, gold)), place)


def _calls(text: str, tags: Grammar) -> Iterator[tuple[str, str]]:
    """The calls of a turn: the tool and what it was asked."""
    for found in action_pattern(tags).finditer(text):
        for number, (name, _) in enumerate(tags.tools):
            content = found[f"tool{number}"]
            if content is not None:
                call = native.read_call(content) if tags is native.GRAMMAR else None
                if call is None:
                    yield name, content.strip()
                else:
                    yield call.tool, str(call.arguments)


def _documents(information: str, gold: Sequence[str]) -> Iterator[Found]:
    """The passages as they were worded; what has no heading is one without a title."""
    starts = list(DOCUMENT.finditer(information))
    if not starts and information.strip():
        yield Found("", information.strip(), "", covers(information, gold))
    ends = [*(one.start() for one in starts[1:]), None]
    for one, end in zip(starts, ends, strict=False):
        text = information[one.end() : end].strip()
        has_answer = covers(f"{one['title']}\n{text}", gold)
        yield Found(one["title"], text, one["id"] or "", has_answer)
