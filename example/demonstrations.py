"""Dialogues for the warm start: right in form, but searching less than the questions need.

They teach the tags, the queries and copying from a passage. They leave the gap that reinforcement
learning closes: they look up cities, but mostly believe that they know the facts about a country,
in one-hop questions as in the second hop of the others, and guess a number. All are about training
entities, and every observation is what BM25 really brought.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from example.corpus import Fact
from example.questions import ABILITY, TEMPLATE, Question, to_prompt
from example.retrieval import PassageSearch, ids_of
from search_r1.agent.tags import TEMPLATES
from search_r1.search.schema import Document

NUM_DEMONSTRATIONS = 400
TOPK = 1  # documents an observation
CITY_SEARCH_SHARE = 0.9  # of the single-hop questions about a city; the others guess at once
COUNTRY_SEARCH_SHARE = 0.15  # of the single-hop questions about a country
TWO_HOP_SEARCH_SHARE = (
    0.25  # search for the city, then its country; the others guess after the city
)

# The kinds by turns, as (hops, about a city): a warm start of few small batches sees every kind.
ORDER = (
    (1, False),
    (2, False),
    (1, True),
    (2, False),
    (1, False),
    (2, False),
    (1, True),
    (2, False),
)

GUESS_DIGITS = {  # how many digits a plausible wrong answer has
    None: (5, 6),
    Fact.CALLING_CODE: (2, 3),
    Fact.ISO_NUMBER: (3, 3),
    Fact.AREA: (5, 6),
    Fact.DENSITY: (2, 3),
}


class Origin(StrEnum):
    """Who wrote a stretch of a dialogue."""

    POLICY = "policy"
    OBSERVATION = "observation"


@dataclass(frozen=True)
class Segment:
    """A stretch of a dialogue's text by one writer."""

    origin: Origin
    text: str


@dataclass(frozen=True)
class Demonstration:
    """One dialogue: its question and what follows the prompt."""

    question: Question
    segments: tuple[Segment, ...]


def build_demonstrations(
    questions: Sequence[Question], search: PassageSearch, seed: int = 0
) -> list[Demonstration]:
    """Dialogues for `NUM_DEMONSTRATIONS` questions whose planned searches work, kinds by turns.

    The shares hold exactly within each kind of question and are spread evenly, so that the first
    few batches already have them. Raises ValueError when there are too few questions.
    """
    rng = random.Random(f"demonstrations-{seed}")
    counts: Counter[tuple[int, bool]] = Counter()  # questions so far, by kind
    demonstrations = []
    for question in _by_turns(questions):
        documents = _planned_documents(question, search)
        if documents is None:
            continue
        num_hops = len(question.hops)
        kind = _kind(question)
        counts[kind] += 1
        is_thorough = _is_next_of_share(counts[kind], search_share(question))
        searches = num_hops if is_thorough else num_hops - 1
        segments = dialogue(question, documents[:searches], rng)
        demonstrations.append(Demonstration(question, tuple(segments)))
        if len(demonstrations) == NUM_DEMONSTRATIONS:
            return demonstrations
    raise ValueError(
        f"got {len(demonstrations)} demonstrations, expected {NUM_DEMONSTRATIONS}: "
        f"raise the number of training questions in example/questions.py"
    )


def search_share(question: Question) -> float:
    """How many demonstrations of the question's kind make every search that it needs."""
    if len(question.hops) > 1:
        return TWO_HOP_SEARCH_SHARE
    return CITY_SEARCH_SHARE if question.fact is None else COUNTRY_SEARCH_SHARE


def write_demonstrations(demonstrations: Sequence[Demonstration], path: Path) -> None:
    """Write one JSON object a line: the prompt's messages and the segments after it."""
    rows = (
        {
            "prompt": to_prompt(demonstration.question),
            "segments": [asdict(segment) for segment in demonstration.segments],
            "ability": ABILITY,
            "data_source": demonstration.question.data_source,
        }
        for demonstration in demonstrations
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _kind(question: Question) -> tuple[int, bool]:
    """The number of hops, and whether a city's own population is asked."""
    return len(question.hops), question.fact is None


def _by_turns(questions: Sequence[Question]) -> Iterator[Question]:
    """The questions with their kinds in `ORDER`, until one kind runs out."""
    queues = {
        kind: iter([question for question in questions if _kind(question) == kind])
        for kind in set(ORDER)
    }
    for kind in itertools.cycle(ORDER):
        question = next(queues[kind], None)
        if question is None:
            return
        yield question


def _is_next_of_share(position: int, share: float) -> bool:
    """Whether the item at a position (from 1) is one of an evenly spread share.

    Example: share 0.4 picks the positions 3, 5, 8, 10, 13, 15 …
    """
    return int(position * share + 1e-9) > int((position - 1) * share + 1e-9)


def _planned_documents(question: Question, search: PassageSearch) -> list[list[Document]] | None:
    """What each planned search brings, or None when one misses its passage."""
    found = search.search([hop.query for hop in question.hops], TOPK)
    firsts = [ids_of(row)[:1] for row in found]
    hits = [first == [hop.passage_id] for first, hop in zip(firsts, question.hops, strict=True)]
    return found if all(hits) else None


def dialogue(
    question: Question, documents: Sequence[Sequence[Document]], rng: random.Random
) -> list[Segment]:
    """Think and search for each given list of documents, then answer: copied, or guessed."""
    segments = []
    for turn, row in enumerate(documents):
        query = question.hops[turn].query
        text = f"<think> {_search_thought(question, turn)} </think> <search> {query} </search>"
        segments.append(Segment(Origin.POLICY, text))
        segments.append(Segment(Origin.OBSERVATION, TEMPLATES[TEMPLATE].observation(row)))
    segments.append(Segment(Origin.POLICY, _last_turn(question, len(documents), rng)))
    return segments


def _search_thought(question: Question, turn: int) -> str:
    """Why this search is made, in a few words."""
    if turn == 1:
        return f"{question.subject} lies in {question.bridge}. Now its {question.fact}."
    return f"I need to look up {question.subject}."


def _last_turn(question: Question, num_searches: int, rng: random.Random) -> str:
    """The answer's turn: copied when every planned search was made, else a guess."""
    if num_searches == len(question.hops):
        thought, answer = "The document says it.", question.answers[0]
    else:
        known = f"{question.subject} lies in {question.bridge}. " if num_searches else ""
        thought, answer = f"{known}I know the number.", _guess(question, rng)
    return f"<think> {thought} </think> <answer> {answer} </answer>"


def _guess(question: Question, rng: random.Random) -> str:
    """A number of a plausible length that is not the answer."""
    low, high = GUESS_DIGITS[question.fact]
    while True:
        num_digits = rng.randint(low, high)
        number = str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
        if number not in question.answers:
            return number
