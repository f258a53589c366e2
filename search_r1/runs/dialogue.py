"""Parse one recorded dialogue for display: its turns, searches, documents and answer.

Reads rows of `verl.data.trajectories`, with ids and log-probs, and rows of a validation, which
contain only text. Opens no files.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from search_r1.agent.grammar import SEARCH_R1, Grammar, spans_between
from search_r1.agent.question import question_in
from search_r1.agent.tags import NAMES, PLAIN, named_format
from search_r1.rewards.interface import extract_answer
from search_r1.rewards.normalize import (
    RULES,
    Normalize,
    contains_answer,
    matches_exactly,
    normalize_answer,
)
from verl.agent import native
from verl.agent.grammar import action_pattern
from verl.errors import UserError

Row = Mapping[str, Any]

POLICY, OBSERVATION = "policy", "observation"
QUESTION_END = re.compile(r"\n|<\|")
"""End of the question in a prompt: end of line, or a token of the chat template."""
_HEADING = re.compile(r'^Doc \d+\(Title: "', re.MULTILINE)
_HEADING_END = re.compile(r'"(?:, id: ([^)\n]*))?\) ?')
UNKNOWN_CALL = re.compile(r"<(\w+)>([^<]*)</\1>\s*\Z")
"""Call of a tool that is not in the configuration."""
MAX_QUESTION_CHARS = 300
"""Characters from the end of a prompt that are shown if it marks no question."""


@dataclass(frozen=True)
class FoundDocument:
    """A document in a search result, as the policy read it."""

    title: str
    text: str
    id: str
    has_answer: bool


@dataclass(frozen=True)
class RecordedSearch:
    """One tool call and its result."""

    tool: str
    query: str
    documents: tuple[FoundDocument, ...]
    segment: int
    """Index of the segment that contains the call."""


@dataclass(frozen=True)
class Dialogue:
    """A parsed row, of a training trajectory or of a validation."""

    question: str
    answer: str | None
    gold: tuple[str, ...]
    searches: tuple[RecordedSearch, ...]
    segments: tuple[Mapping[str, Any], ...]
    """`origin` and `text` of each segment; for training also the ids and columns of its tokens."""
    components: Mapping[str, float]
    is_given: bool
    """Whether the policy gave an accepted answer."""

    @property
    def is_found(self) -> bool:
        """Whether some document contains an accepted answer."""
        return any(doc.has_answer for search in self.searches for doc in search.documents)


def tags_of(config: Row) -> Grammar:
    """Return the tags of a run's dialogues from its `config.yaml`; by default Search-R1's."""
    template = str(config.get("template") or NAMES[0])
    if template == native.NAME:
        return native.GRAMMAR
    tools = (config.get("agent") or {}).get("tools") or ["search"]
    try:
        tags = Grammar() if template == PLAIN else named_format(template).tags
    except UserError:  # the template's file has been moved since
        tags = SEARCH_R1
    return tags.with_tools(name for name in map(str, tools) if name.isidentifier())


def rule_of(config: Row) -> Normalize:
    """Return the rule that compares a run's answers from its `config.yaml`; by default SQuAD's."""
    reward = config.get("reward_model")
    name = reward.get("normalize") if isinstance(reward, Mapping) else None
    return RULES.get(str(name), normalize_answer)


def read_dialogue(row: Row, tags: Grammar, normalize: Normalize = normalize_answer) -> Dialogue:
    """Parse a row of either kind. Raises KeyError, TypeError or AttributeError if it is neither.

    Answers are compared by the rule `normalize`.
    """
    has_segments = "segments" in row
    segments = tuple(row["segments"]) if has_segments else tuple(_split_text(row["dialogue"], tags))
    gold = tuple(map(str, row["ground_truth"]))
    texts = [segment["text"] for segment in segments if segment["origin"] == POLICY]
    # A row of a validation has the components of its reward as keys next to the score.
    components = {k: v for k, v in row.items() if isinstance(v, float) and k != "score"}
    answer = extract_answer(texts, tags)
    return Dialogue(
        question=str(row.get("question") or _question(segments)),
        answer=answer,
        gold=gold,
        searches=tuple(
            _searches(segments, tags, partial(contains_answer, accepted=gold, normalize=normalize))
        ),
        segments=segments,
        components=row["components"] if has_segments else components,
        is_given=answer is not None and matches_exactly(answer, gold, normalize),
    )


def _split_text(text: str, tags: Grammar) -> Iterator[dict[str, str]]:
    """Split a dialogue's text: text between information tags is an observation."""
    last = 0
    for start, end in spans_between(text, tags.information):
        opened, closed = start - len(tags.information.opening), end + len(tags.information.closing)
        if opened > last:
            yield {"origin": POLICY, "text": text[last:opened]}
        yield {"origin": OBSERVATION, "text": text[opened:closed]}
        last = closed
    if last < len(text):
        yield {"origin": POLICY, "text": text[last:]}


def _question(segments: Sequence[Row]) -> str:
    """Return the last question in the prompt, or the prompt's end if it marks none."""
    prompt = "".join(segment["text"] for segment in segments if segment["origin"] == "prompt")
    last = question_in(prompt)
    if last is None:
        return prompt[-MAX_QUESTION_CHARS:]
    return QUESTION_END.split(last.lstrip(), maxsplit=1)[0].strip()


def _searches(
    segments: Sequence[Row], tags: Grammar, has_answer: Callable[[str], bool]
) -> Iterator[RecordedSearch]:
    """Yield each call that was answered with information."""
    for index, (turn, after) in enumerate(itertools.pairwise(segments)):
        if turn["origin"] != POLICY or after["origin"] != OBSERVATION:
            continue
        spans = spans_between(after["text"], tags.information)
        results = [after["text"][start:end] for start, end in spans]
        calls = list(_calls(turn["text"], tags)) or UNKNOWN_CALL.findall(turn["text"])
        for (tool, query), information in zip(calls[-len(results) :], results, strict=False):
            yield RecordedSearch(tool, query, tuple(_documents(information, has_answer)), index)


def _calls(text: str, tags: Grammar) -> Iterator[tuple[str, str]]:
    """Yield tool and query of each call in a turn."""
    for match in action_pattern(tags).finditer(text):
        for number, (name, _) in enumerate(tags.tools):
            content = match[f"tool{number}"]
            if content is not None:
                call = native.read_call(content) if tags is native.GRAMMAR else None
                if call is None:
                    yield name, content.strip()
                else:
                    yield call.tool, str(call.arguments)


@dataclass(frozen=True)
class Heading:
    """The heading of a document in a result."""

    start: int
    end: int
    title: str
    id: str


def find_headings(information: str) -> list[Heading]:
    """Return the headings of a result, each at the start of a line, in linear time."""
    found, last = list[Heading](), 0
    for opening in _HEADING.finditer(information):
        line_end = information.find("\n", opening.end())
        line_end = len(information) if line_end < 0 else line_end
        # Behind the last bracket of the line no heading ends, so that nothing is looked for there.
        limit = information.rfind(")", opening.end(), line_end) + 2
        ending = _HEADING_END.search(information, opening.end(), min(limit, line_end))
        if ending is not None and opening.start() >= last:
            title, last = information[opening.end() : ending.start()], ending.end()
            found.append(Heading(opening.start(), last, title, ending[1] or ""))
    return found


def _documents(information: str, has_answer: Callable[[str], bool]) -> Iterator[FoundDocument]:
    """Yield the documents of a result; text without headings is one document without a title."""
    headings = find_headings(information)
    if not headings and information.strip():
        yield FoundDocument("", information.strip(), "", has_answer(information))
    ends = [*(heading.start for heading in headings[1:]), None]
    for heading, end in zip(headings, ends, strict=False):
        text = information[heading.end : end].strip()
        is_found = has_answer(f"{heading.title}\n{text}")
        yield FoundDocument(heading.title, text, heading.id, is_found)
