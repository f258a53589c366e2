"""Countries and cities, with passages about them, questions, and dialogues that answer these.

The real world is read from the committed corpus; invented worlds are training data of the tiny
policy. A question about a city or a country takes one search, one about the country of a city two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.schema import Document

FOLDER = Path(__file__).resolve().parent
CORPUS = FOLDER / "corpus.jsonl"
DATA = FOLDER / "data"
TEMPLATE = "short"
VALIDATION_SHARE = 0.25
"""Fraction of the real countries, chosen by a hash of the name; cities belong to their country."""
NUM_QUESTIONS = 2000
"""Number of questions about a world; half of them take two searches."""
CITY_SHARE = 0.4
"""Fraction of the one-search questions that are about cities; the others are about countries."""


class Fact(StrEnum):
    """A numeric fact about a country; the value is its name in passages and queries."""

    CALLING_CODE = "calling code"
    ISO_NUMBER = "ISO number"
    AREA = "area"
    DENSITY = "population density"


UNITS = {Fact.AREA: " square km", Fact.DENSITY: " people per square km"}
WORDINGS: dict[Fact | None, tuple[str, ...]] = {
    None: (
        "What is the population of {name}?",
        "How many people live in {name}?",
        "How many inhabitants does {name} have?",
    ),
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
"""Wordings of questions about a fact; None stands for the population of a city."""
COUNTRY_OF_CITY = ("the country where {name} lies", "the country of {name}")
GUESS_DIGITS = {None: (5, 6), Fact.CALLING_CODE: (2, 3), Fact.ISO_NUMBER: (3, 3),
                Fact.AREA: (5, 6), Fact.DENSITY: (2, 3)}  # fmt: skip
"""Minimum and maximum number of digits of a plausible wrong answer."""


@dataclass(frozen=True)
class Country:
    """A country with four facts, each a short number as text."""

    name: str
    facts: dict[Fact, str]

    def passage(self, fact: Fact) -> Document:
        """Return the passage with one fact."""
        text = f"The {fact} of {self.name} is {self.facts[fact]}{UNITS.get(fact, '')}."
        ident = f"{self.name}-{fact}".lower().replace(" ", "-")
        return Document.from_title(ident, f"{self.name} {fact}", text)

    def answers(self, fact: Fact) -> tuple[str, ...]:
        """Return the accepted answers: the number as in the passage, then other natural forms."""
        value = self.facts[fact]
        return tuple(dict.fromkeys([value, value + UNITS.get(fact, ""), value.lstrip("0")]))


@dataclass(frozen=True)
class City:
    """A city whose name is unique in its world."""

    name: str
    population: int
    country: Country

    @property
    def passage(self) -> Document:
        """The passage with its country and population."""
        where = f"{self.name} is a city in {self.country.name}."
        text = f"{where} Its population is {self.population}."
        return Document.from_title(f"city-{self.name.lower()}", self.name, text)


@dataclass(frozen=True)
class World:
    """Countries and cities, each in alphabetical order."""

    countries: tuple[Country, ...]
    cities: tuple[City, ...]


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and the searches that find them."""

    text: str
    answers: tuple[str, ...]
    plan: tuple[tuple[str, Document], ...]
    """Query and resulting passage of each search."""
    subject: str
    """The entity in the question."""
    fact: Fact | None = None
    bridge: str = ""
    """The country that a two-search question is about without naming it."""

    @property
    def data_source(self) -> str:
        """Name of the question's group in validation metrics."""
        return "geo_single" if len(self.plan) == 1 else "geo_two_hop"

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The chat messages of the prompt: one user message."""
        return [{"role": "user", "content": TEMPLATES[TEMPLATE].user_prompt(self.text)}]


@dataclass(frozen=True)
class Dialogue:
    """A question and the segments after its prompt: (policy or observation, text)."""

    question: Question
    segments: tuple[tuple[str, str], ...]

    def record(self) -> dict[str, object]:
        """Return the row for `verl.ext.sft.demonstrations`."""
        segments = [{"origin": origin, "text": text} for origin, text in self.segments]
        return {
            "prompt": self.question.prompt,
            "segments": segments,
            "ability": "fact-reasoning",
            "data_source": self.question.data_source,
        }


def is_validation(country: str) -> bool:
    """Return whether a real country, with all of its cities, belongs to the validation half."""
    digest = hashlib.sha256(f"0:{country}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < VALIDATION_SHARE


def training_world() -> World:
    """Return the training half of the real world."""
    return real_world(lambda country: not is_validation(country))


def real_world(has: Callable[[str], bool], corpus: Path = CORPUS) -> World:
    """Return the countries that a half `has`, with their cities, read from the committed corpus."""
    facts: dict[str, dict[Fact, str]] = {}
    cities = []
    for line in corpus.read_text(encoding="ascii").splitlines():
        text = json.loads(line)["contents"].partition("\n")[2]
        if match := re.fullmatch(r"The (.+?) of (.+) is (\d+)( .*)?\.", text):
            facts.setdefault(match[2], {})[Fact(match[1])] = match[3]
        elif match := re.fullmatch(r"(\w+) is a city in (.+)\. Its population is (\d+)\.", text):
            cities.append((match[1], int(match[3]), match[2]))
    countries = {n: Country(n, known) for n, known in facts.items() if has(n)}
    return World(
        tuple(countries.values()),
        tuple(City(n, size, countries[where]) for n, size, where in cities if where in countries),
    )


def build_questions(world: World, seed: int) -> list[Question]:
    """Return NUM_QUESTIONS, alternately of one and two searches; depends only on world and seed."""
    rng = random.Random(f"questions-{seed}-train")
    num_each = NUM_QUESTIONS // 2
    num_city = round(num_each * CITY_SHARE)
    single = [
        *itertools.islice(city_questions(world.cities, rng), num_city),
        *itertools.islice(country_questions(world.countries, rng), num_each - num_city),
    ]
    rng.shuffle(single)
    two_hop = list(two_hop_questions(world.cities, rng))[:num_each]
    return [question for pair in zip(single, two_hop, strict=True) for question in pair]


def city_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """Yield questions for the population of a city: each city once, in random order."""
    for city in rng.sample(cities, len(cities)):
        text = rng.choice(WORDINGS[None]).format(name=city.name)
        plan = ((f"{city.name} population", city.passage),)
        yield Question(text, (str(city.population),), plan, city.name)


def country_questions(countries: Sequence[Country], rng: random.Random) -> Iterator[Question]:
    """Yield each fact of each country in each wording, in random order; each fact once first."""
    pairs = list(itertools.product(countries, Fact))
    for repeat in range(2):
        for country, fact in rng.sample(pairs, len(pairs)):
            shift = list(Fact).index(fact) + len(country.name)  # varies the wording between pairs
            text = WORDINGS[fact][(repeat + shift) % 2].format(name=country.name)
            yield Question(text, country.answers(fact), (_hop(country, fact),), country.name, fact)


def two_hop_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """Yield questions for facts of a city's country, varied so that no answer is frequent."""
    facts = itertools.cycle(Fact)
    for city in _alternating_countries(cities, rng):
        fact, country = next(facts), city.country
        phrase = rng.choice(COUNTRY_OF_CITY).format(name=city.name)
        text = rng.choice(WORDINGS[fact]).format(name=phrase)
        plan = ((f"{city.name} country", city.passage), _hop(country, fact))
        yield Question(text, country.answers(fact), plan, city.name, fact, country.name)


def _alternating_countries(cities: Sequence[City], rng: random.Random) -> Iterator[City]:
    """Yield all cities: one of each country in random order, then a second of each, and so on."""
    by_country: dict[str, list[City]] = {}
    for city in rng.sample(cities, len(cities)):
        by_country.setdefault(city.country.name, []).append(city)
    while by_country:
        for name in rng.sample(sorted(by_country), len(by_country)):
            yield by_country[name].pop()
            if not by_country[name]:
                del by_country[name]


def _hop(country: Country, fact: Fact) -> tuple[str, Document]:
    return f"{country.name} {fact}", country.passage(fact)


def build_dialogue(question: Question, num_searches: int, rng: random.Random) -> Dialogue:
    """Return a dialogue that answers correctly after all planned searches and guesses otherwise."""
    segments = []
    for turn, (query, passage) in enumerate(question.plan[:num_searches]):
        thought = f"I need to look up {question.subject}."
        if turn == 1:
            thought = f"{question.subject} lies in {question.bridge}. Now its {question.fact}."
        segments.append(("policy", f"<think> {thought} </think> <search> {query} </search>"))
        segments.append(("observation", TEMPLATES[TEMPLATE].observation([passage])))
    if num_searches == len(question.plan):
        thought, answer = "The document says it.", question.answers[0]
    else:
        known = f"{question.subject} lies in {question.bridge}. " if num_searches else ""
        thought, answer = f"{known}I know the number.", guess(question.fact, question.answers, rng)
    segments.append(("policy", f"<think> {thought} </think> <answer> {answer} </answer>"))
    return Dialogue(question, tuple(segments))


def guess(fact: Fact | None, answers: Sequence[str], rng: random.Random) -> str:
    """Return a number of a plausible length for a fact that is not an accepted answer."""
    low, high = GUESS_DIGITS[fact]
    while True:
        num_digits = rng.randint(low, high)
        number = str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
        if number not in answers:
            return number
