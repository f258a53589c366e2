"""Countries and cities, passages about them, questions, and dialogues that answer these.

The real world is read from the committed corpus; invented ones teach the tiny policy. A question
about a city or a country takes one search, a question about a city's country takes two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from search_r1.agent.tags import TEMPLATES
from search_r1.search.schema import Document

FOLDER = Path(__file__).resolve().parent
CORPUS = FOLDER / "corpus.jsonl"
DATA = FOLDER / "data"
TEMPLATE = "short"
VALIDATION_SHARE = 0.25
"""Of the real countries, chosen by a hash of the name; a city goes with its country."""
NUM_QUESTIONS = 2000
"""Of a world: half of them take two searches."""
CITY_SHARE = 0.4
"""Of the questions that take one search; the others are about countries."""


class Fact(StrEnum):
    """A number that is known of a country; the value is how passages and queries name it."""

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
"""Questions; without a fact a city's population is asked."""
COUNTRY_OF_CITY = ("the country where {name} lies", "the country of {name}")
GUESS_DIGITS = {
    None: (5, 6),
    Fact.CALLING_CODE: (2, 3),
    Fact.ISO_NUMBER: (3, 3),
    Fact.AREA: (5, 6),
    Fact.DENSITY: (2, 3),
}
"""How many digits a plausible wrong answer has."""


@dataclass(frozen=True)
class Country:
    """A country with four facts, each a short number as its passage shows it."""

    name: str
    facts: dict[Fact, str]

    def passage(self, fact: Fact) -> Document:
        """The passage that holds one fact."""
        text = f"The {fact} of {self.name} is {self.facts[fact]}{UNITS.get(fact, '')}."
        ident = f"{self.name}-{fact}".lower().replace(" ", "-")
        return Document.from_title(ident, f"{self.name} {fact}", text)

    def answers(self, fact: Fact) -> tuple[str, ...]:
        """The gold forms: the number as the passage shows it, then other natural ones."""
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
        """Its country and population."""
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
    """A question, its gold answers, and the searches that find them with what they bring."""

    text: str
    answers: tuple[str, ...]
    plan: tuple[tuple[str, Document], ...]
    subject: str
    """The entity that the question names."""
    fact: Fact | None = None
    bridge: str = ""
    """The country that a question of two searches does not name."""

    @property
    def data_source(self) -> str:
        """The name under which validation reports the question."""
        return "geo_single" if len(self.plan) == 1 else "geo_two_hop"

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The chat messages that ask it: one of the user."""
        return [{"role": "user", "content": TEMPLATES[TEMPLATE].user_prompt(self.text)}]


@dataclass(frozen=True)
class Dialogue:
    """A question and what follows its prompt: (policy or observation, text)."""

    question: Question
    segments: tuple[tuple[str, str], ...]

    def record(self) -> dict[str, object]:
        """The row that `verl.sft.demonstrations` reads."""
        segments = [{"origin": origin, "text": text} for origin, text in self.segments]
        return {
            "prompt": self.question.prompt,
            "segments": segments,
            "ability": "fact-reasoning",
            "data_source": self.question.data_source,
        }


def is_validation(country: str) -> bool:
    """Whether a real country, and all of its cities, is kept for validation."""
    digest = hashlib.sha256(f"0:{country}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < VALIDATION_SHARE


def training_world(corpus: Path = CORPUS) -> World:
    """The training half of the real world, as the committed corpus tells it."""
    facts: dict[str, dict[Fact, str]] = {}
    cities = []
    for line in corpus.read_text(encoding="ascii").splitlines():
        text = json.loads(line)["contents"].partition("\n")[2]
        if found := re.fullmatch(r"The (.+?) of (.+) is (\d+)( .*)?\.", text):
            facts.setdefault(found[2], {})[Fact(found[1])] = found[3]
        elif found := re.fullmatch(r"(\w+) is a city in (.+)\. Its population is (\d+)\.", text):
            cities.append((found[1], int(found[3]), found[2]))
    own = {name: Country(name, known) for name, known in facts.items() if not is_validation(name)}
    return World(
        tuple(own.values()),
        tuple(City(name, size, own[where]) for name, size, where in cities if where in own),
    )


def build_questions(world: World, seed: int) -> list[Question]:
    """`NUM_QUESTIONS` about a world, of one and of two searches by turns; from the seed alone."""
    rng = random.Random(f"questions-{seed}-train")
    num_each = NUM_QUESTIONS // 2
    num_city = round(num_each * CITY_SHARE)
    single = [
        *itertools.islice(_city_questions(world.cities, rng), num_city),
        *itertools.islice(_country_questions(world.countries, rng), num_each - num_city),
    ]
    rng.shuffle(single)
    two_hop = list(_two_hop_questions(world.cities, rng))[:num_each]
    return [question for pair in zip(single, two_hop, strict=True) for question in pair]


def _city_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """How many people live in a city: each city once, in random order."""
    for city in rng.sample(cities, len(cities)):
        text = rng.choice(WORDINGS[None]).format(name=city.name)
        plan = ((f"{city.name} population", city.passage),)
        yield Question(text, (str(city.population),), plan, city.name)


def _country_questions(countries: Sequence[Country], rng: random.Random) -> Iterator[Question]:
    """Each fact of each country in each wording, in random order; every fact once first."""
    pairs = list(itertools.product(countries, Fact))
    for turn in range(2):
        for country, fact in rng.sample(pairs, len(pairs)):
            shift = list(Fact).index(fact) + len(country.name)  # wordings alternate over pairs
            text = WORDINGS[fact][(turn + shift) % 2].format(name=country.name)
            yield Question(text, country.answers(fact), (_hop(country, fact),), country.name, fact)


def _two_hop_questions(cities: Sequence[City], rng: random.Random) -> Iterator[Question]:
    """A fact about a city's country, the countries by turns so that no answer is frequent."""
    facts = itertools.cycle(Fact)
    for city in _by_turns(cities, rng):
        fact, country = next(facts), city.country
        phrase = rng.choice(COUNTRY_OF_CITY).format(name=city.name)
        text = rng.choice(WORDINGS[fact]).format(name=phrase)
        plan = ((f"{city.name} country", city.passage), _hop(country, fact))
        yield Question(text, country.answers(fact), plan, city.name, fact, country.name)


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


def _hop(country: Country, fact: Fact) -> tuple[str, Document]:
    return f"{country.name} {fact}", country.passage(fact)


def dialogue(question: Question, num_searches: int, rng: random.Random) -> Dialogue:
    """Think and search so many times, then answer: copied after the whole plan, else guessed."""
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
        thought, answer = f"{known}I know the number.", _guess(question, rng)
    segments.append(("policy", f"<think> {thought} </think> <answer> {answer} </answer>"))
    return Dialogue(question, tuple(segments))


def _guess(question: Question, rng: random.Random) -> str:
    """A number of a plausible length that is not the answer."""
    low, high = GUESS_DIGITS[question.fact]
    while True:
        num_digits = rng.randint(low, high)
        number = str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
        if number not in question.answers:
            return number
