"""Questions about the example world, as objects and as rows in the Search-R1 parquet format.

A single-hop question names the entity whose passage holds the answer. A two-hop question names a
city and asks for a fact about its country, so the first passage is needed to write the second
query. Each question carries its plan: the queries that work and the passages they must bring.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from example.corpus import Fact, city_id, fact_id
from example.world import City, Country, Split, World
from search_r1.agent.tags import TEMPLATES

TEMPLATE = "short"
ABILITY = "fact-reasoning"
SINGLE_HOP = "geo_single"
TWO_HOP = "geo_two_hop"
NUM_ROWS = {Split.TRAIN: 2000, Split.VALIDATION: 120}
CITY_SHARE = 0.4  # of the single-hop questions; the others ask about countries

CITY_WORDINGS = (
    "What is the population of {name}?",
    "How many people live in {name}?",
    "How many inhabitants does {name} have?",
)
COUNTRY_WORDINGS = {
    Fact.CALLING_CODE: (
        "What is the calling code of {name}?",
        "Which calling code does {name} use?",
    ),
    Fact.ISO_NUMBER: ("What is the ISO number of {name}?", "Which ISO number does {name} have?"),
    Fact.AREA: ("What is the area of {name}?", "How many square km does {name} cover?"),
    Fact.DENSITY: (
        "What is the population density of {name}?",
        "How many people live on a square km of {name}?",
    ),
}
COUNTRY_OF_CITY = ("the country where {name} lies", "the country of {name}")


@dataclass(frozen=True)
class Hop:
    """One search of a question's plan: a query that works and the passage it must bring."""

    query: str
    passage_id: str


@dataclass(frozen=True)
class Question:
    """A question, its gold answers (the first is what the passage shows) and its plan."""

    text: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]
    split: Split
    subject: str  # the entity that the question names
    bridge: str | None = None  # the country that a two-hop question does not name
    fact: Fact | None = None  # what is asked of a country; None asks a city's population

    @property
    def data_source(self) -> str:
        """The name under which validation reports the question."""
        return SINGLE_HOP if len(self.hops) == 1 else TWO_HOP


def build_questions(
    world: World,
    split: Split,
    drop_shortcuts: Callable[[list[Question]], list[Question]] = list,
    seed: int = 0,
) -> list[Question]:
    """One half's questions, single- and two-hop by turns, `NUM_ROWS[split]` of them.

    `drop_shortcuts` removes two-hop questions that one search would answer. Raises ValueError
    when the half has too few entities for that many distinct questions.
    """
    rng = random.Random(f"questions-{seed}-{split.value}")
    num_each = NUM_ROWS[split] // 2
    num_city = round(num_each * CITY_SHARE)
    countries, cities = world.countries_of(split), world.cities_of(split)
    single = [
        *_take(_city_questions(cities, rng), num_city, "city", split),
        *_take(_country_questions(countries, rng), num_each - num_city, "country", split),
    ]
    rng.shuffle(single)
    candidates = drop_shortcuts(list(_two_hop_questions(cities, rng)))
    two_hop = _take(iter(candidates), num_each, "two-hop", split)
    return [question for pair in zip(single, two_hop, strict=True) for question in pair]


def to_row(question: Question, index: int) -> dict[str, Any]:
    """One row of the parquet file: the question in its prompt, with its gold answers."""
    return {
        "data_source": question.data_source,
        "prompt": to_prompt(question),
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {
            "split": question.split.value,
            "index": index,
            "question": question.text,
            "hops": len(question.hops),
        },
    }


def to_prompt(question: Question) -> list[dict[str, str]]:
    """The chat messages that ask the question: one of the user."""
    return [{"role": "user", "content": TEMPLATES[TEMPLATE].user_prompt(question.text)}]


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Write the rows as parquet, with `index` counting from 0."""
    rows = [to_row(question, index) for index, question in enumerate(questions)]
    pd.DataFrame(rows).to_parquet(path, index=False)


def _city_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """How many people live in a city: each city once, in random order."""
    for city in rng.sample(cities, len(cities)):
        yield Question(
            text=rng.choice(CITY_WORDINGS).format(name=city.name),
            answers=(str(city.population),),
            hops=(Hop(f"{city.name} population", city_id(city)),),
            split=city.split,
            subject=city.name,
        )


def _country_questions(countries: Sequence[Country], rng: random.Random) -> Iterator[Question]:
    """Each fact of each country in each wording, in random order; every fact once first."""
    pairs = list(itertools.product(countries, Fact))
    for turn in range(max(map(len, COUNTRY_WORDINGS.values()))):
        for country, fact in rng.sample(pairs, len(pairs)):
            wordings = COUNTRY_WORDINGS[fact]
            if turn >= len(wordings):
                continue
            shift = list(Fact).index(fact) + len(country.name)  # wordings alternate over pairs
            yield Question(
                text=wordings[(turn + shift) % len(wordings)].format(name=country.name),
                answers=_answers(country, fact),
                hops=(_country_hop(country, fact),),
                split=country.split,
                subject=country.name,
                fact=fact,
            )


def _two_hop_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """A fact about a city's country, the countries by turns so that no answer is frequent."""
    facts = itertools.cycle(Fact)
    for city in _by_turns(cities, rng):
        fact = next(facts)
        country_phrase = rng.choice(COUNTRY_OF_CITY).format(name=city.name)
        yield Question(
            text=rng.choice(COUNTRY_WORDINGS[fact]).format(name=country_phrase),
            answers=_answers(city.country, fact),
            hops=(Hop(f"{city.name} country", city_id(city)), _country_hop(city.country, fact)),
            split=city.split,
            subject=city.name,
            bridge=city.country.name,
            fact=fact,
        )


def _by_turns(cities: Sequence[City], rng: random.Random) -> Iterator[City]:
    """All cities: one of each country in random order, then a second of each, and so on."""
    by_country: dict[str, list[City]] = {}
    for city in rng.sample(cities, len(cities)):
        by_country.setdefault(city.country.name, []).append(city)
    while by_country:
        for name in rng.sample(sorted(by_country), len(by_country)):
            yield by_country[name].pop()
            if not by_country[name]:
                del by_country[name]


def _country_hop(country: Country, fact: Fact) -> Hop:
    """The search that brings one fact about a country."""
    return Hop(f"{country.name} {fact.value}", fact_id(country, fact))


def _answers(country: Country, fact: Fact) -> tuple[str, ...]:
    """The gold forms: the number as the passage shows it, then other natural ones."""
    value = fact.of(country)
    variants = [value, value + fact.unit, value.lstrip("0")]
    return tuple(dict.fromkeys(variants))


def _take(questions: Iterator[Question], count: int, kind: str, split: Split) -> list[Question]:
    """The first `count` questions; ValueError when there are fewer."""
    taken = list(itertools.islice(questions, count))
    if len(taken) < count:
        raise ValueError(
            f"got {len(taken)} {kind} questions for {split.value}, expected {count}: "
            f"lower NUM_ROWS or keep more countries and cities in example/world.py"
        )
    return taken
