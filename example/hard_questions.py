"""The questions of the harder world, and how demonstrations answer them.

The words of a question do not tell whether it can be answered: an invented town may have one
passage, two that differ, one without its population, or none.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from example.geography import (
    TEMPLATE,
    WORDINGS,
    City,
    Country,
    Question,
    World,
    city_questions,
    country_questions,
    guess,
    two_hop_questions,
)
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.schema import Document

UNKNOWN = "unknown"
"""The accepted answer to a question that no document answers."""


class Kind(StrEnum):
    """A kind of question; the value is its data source in validation metrics."""

    SINGLE = "geo_single"
    TWO_HOP = "geo_two_hop"
    THREE_HOP = "geo_three_hop"
    NO_SEARCH = "geo_no_search"
    UNANSWERABLE = "geo_unanswerable"
    NAMESAKE = "geo_namesake"
    OUTDATED = "geo_outdated"


HOPS = {Kind.SINGLE, Kind.TWO_HOP, Kind.THREE_HOP}
"""Kinds whose other demonstrations guess instead of the last search."""
MISLED = {Kind.NAMESAKE, Kind.OUTDATED}
"""Kinds whose other demonstrations take the number of the wrong document; all others guess."""
NOW = (
    "What is the latest population of {name}?",
    "How many people live in {name} now?",
    "How many inhabitants does {name} have now?",
)
CONSONANTS, VOWELS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "t", "v", "z"), "aeiou"
NOTICES = (
    "The population of {name} is now {new}. The number {old} is outdated.",
    "The population of {name} is {new}, not {old}.",
)
"""The first one ranks below the document that it replaces, the second one above."""
HARBOUR = " It lies on the coast and has an old harbour."
"""Makes a town's passage rank below that of its longer namesake, so that either may be first."""
YEARS = range(1990, 2025)


@dataclass(frozen=True)
class Search:
    """A search of a demonstration, and the documents that it has to find."""

    thought: str
    query: str
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True)
class Task:
    """A question, its accepted answers, and how it is answered with and without care."""

    kind: Kind
    text: str
    answers: tuple[str, ...]
    subject: str
    """The entity that is asked about."""
    searches: tuple[Search, ...]
    thought: str
    """What is thought before the right answer."""
    mistake: str
    """The answer without care."""

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The chat messages of the prompt: one user message."""
        return [{"role": "user", "content": TEMPLATES[TEMPLATE].user_prompt(self.text)}]

    def row(self, split: str, index: int) -> dict[str, Any]:
        """Return the row of train.parquet or val.parquet."""
        return {
            "data_source": str(self.kind),
            "prompt": self.prompt,
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(self.answers)}},
            "extra_info": {"split": split, "index": index, "question": self.text,
                           "hops": len(self.searches)},
        }  # fmt: skip

    def dialogue(self, is_careful: bool, observations: dict[str, str]) -> dict[str, Any]:
        """Return the row of sft.jsonl; `observations` holds what each query finds."""
        searches = self.searches
        thought = self.thought
        if not is_careful:
            thought = "The document says it." if self.kind in MISLED else "I know the number."
        if not is_careful and self.kind in HOPS:
            known = searches[-1].thought.partition(" Now ")[0]
            searches = searches[:-1]
            thought = f"{known} {thought}" if searches else thought
        segments = []
        for search in searches:
            turn = f"<think> {search.thought} </think> <search> {search.query} </search>"
            segments.append({"origin": "policy", "text": turn})
            segments.append({"origin": "observation", "text": observations[search.query]})
        answer = self.answers[0] if is_careful else self.mistake
        final = f"<think> {thought} </think> <answer> {answer} </answer>"
        return {
            "prompt": self.prompt,
            "segments": [*segments, {"origin": "policy", "text": final}],
            "ability": "fact-reasoning",
            "data_source": str(self.kind),
        }


class Tasks:
    """Yields tasks of each kind about one half of the world; no invented name occurs twice."""

    def __init__(self, world: World, names: Iterator[str], rng: random.Random) -> None:
        self.world, self.names, self.rng = world, names, rng

    def of(self, kind: Kind) -> Iterator[Task]:
        """Yield tasks of a kind, without end or until all cities are used."""
        world, rng = self.world, self.rng
        if kind is Kind.SINGLE:
            cities = city_questions(world.cities, rng)
            countries = country_questions(world.countries, rng)
            towns = iter(self.plain_town, None)
            mixed = itertools.chain.from_iterable(zip(cities, countries, towns, strict=False))
            return (self.found(kind, question) for question in mixed)
        if kind is Kind.TWO_HOP:
            return (self.found(kind, question) for question in two_hop_questions(world.cities, rng))
        if kind is Kind.THREE_HOP:
            return map(self.museum, two_hop_questions(world.cities, rng))
        ways: dict[Kind, tuple[Callable[[], Task], ...]] = {
            Kind.NO_SEARCH: (self.stated, self.compared),
            Kind.UNANSWERABLE: (self.missing, self.silent),
            Kind.NAMESAKE: (self.twin, self.new_town),
            Kind.OUTDATED: (self.counted_again, self.corrected),
        }
        return (way() for way in itertools.cycle(ways[kind]))

    def found(self, kind: Kind, question: Question) -> Task:
        """Return a question of the example."""
        steps = [question.subject, question.bridge][: len(question.plan)]
        searches = searches_along(steps, question)
        mistake = guess(question.fact, question.answers, self.rng)
        return Task(kind, question.text, question.answers, question.subject, searches,
                    "The document says it.", mistake)  # fmt: skip

    def plain_town(self) -> Question:
        """Return a question about an invented town, so that its name does not tell the kind."""
        city = self.town(next(self.names), self.rng.choice(self.world.countries))
        text = self.rng.choice(WORDINGS[None]).format(name=city.name)
        plan = ((f"{city.name} population", town_document(city)),)
        return Question(text, (str(city.population),), plan, city.name)

    def museum(self, question: Question) -> Task:
        """Return a question for a fact about the country of the city where a museum is."""
        name, city = f"{next(self.names)} Museum", question.subject
        text = f"{name} is a museum in {city}."
        document = Document.from_title(ident("museum", name), name, text)
        plan = ((f"{name} city", document), *question.plan)
        asked = replace(question, text=question.text.replace(city, name), plan=plan, subject=name)
        searches = searches_along([name, city, question.bridge], asked)
        mistake = guess(question.fact, question.answers, self.rng)
        return Task(Kind.THREE_HOP, asked.text, question.answers, name, searches,
                    "The document says it.", mistake)  # fmt: skip

    def stated(self) -> Task:
        """Return a question that states its answer."""
        name, number = next(self.names), self.population()
        asked = self.rng.choice(WORDINGS[None]).format(name=name)
        text = f"{name} has {number} inhabitants. {asked}"
        mistake = guess(None, (number,), self.rng)
        return Task(Kind.NO_SEARCH, text, (number,), name, (), "The question says it.", mistake)

    def compared(self) -> Task:
        """Return a question whose answer is one of two stated numbers."""
        first, second = next(self.names), next(self.names)
        numbers = [self.population(), self.population()]
        order = self.rng.choice(("larger", "smaller"))
        right, wrong = sorted(numbers, key=int, reverse=order == "larger")
        text = (f"{first} has {numbers[0]} inhabitants and {second} has {numbers[1]}. "
                f"How many inhabitants does the {order} city have?")  # fmt: skip
        return Task(Kind.NO_SEARCH, text, (right,), f"{first} {second}", (),
                    f"The {order} number is {right}.", wrong)  # fmt: skip

    def missing(self) -> Task:
        """Return a question about a town that no document names."""
        return self.unanswered(next(self.names), ())

    def silent(self) -> Task:
        """Return a question about a town whose document lacks the fact."""
        name, country = next(self.names), self.rng.choice(self.world.countries)
        text = f"{name} is a city in {country.name}."
        return self.unanswered(name, (Document.from_title(ident("silent", name), name, text),))

    def unanswered(self, name: str, documents: tuple[Document, ...]) -> Task:
        """Return a question for a population that no document has."""
        text = self.rng.choice(WORDINGS[None]).format(name=name)
        return Task(Kind.UNANSWERABLE, text, (UNKNOWN,), name, population_of(name, documents),
                    "No document says it.", guess(None, (), self.rng))  # fmt: skip

    def twin(self) -> Task:
        """Return a question about one of two towns with the same name."""
        name = next(self.names)
        here, there = self.rng.sample(self.world.countries, 2)
        asked, other = self.town(name, here), self.town(name, there)
        text = self.rng.choice(WORDINGS[None]).format(name=f"{name} in {here.name}")
        documents = [town_document(asked), town_document(other)]
        return self.namesake(text, name, documents, asked, other,
                             f"{name} in {here.name} is meant.")  # fmt: skip

    def new_town(self) -> Task:
        """Return a question about a town or about one whose name has a further word."""
        name = next(self.names)
        both = [name, f"New {name}"]
        self.rng.shuffle(both)
        asked, other = (self.town(one, self.rng.choice(self.world.countries)) for one in both)
        text = self.rng.choice(WORDINGS[None]).format(name=both[0])
        documents = [town_document(t, HARBOUR if t.name == name else "") for t in (asked, other)]
        thought = f"{both[0]} is meant, not {both[1]}."
        return self.namesake(text, both[0], documents, asked, other, thought)

    def namesake(
        self, text: str, name: str, documents: list[Document], asked: City, other: City,
        thought: str,
    ) -> Task:  # fmt: skip
        """Return a question about a town that is easily taken for the other one."""
        self.rng.shuffle(documents)  # equal scores rank in the order of the corpus
        return Task(Kind.NAMESAKE, text, (str(asked.population),), name,
                    population_of(name, documents), thought, str(other.population))  # fmt: skip

    def counted_again(self) -> Task:
        """Return a question about a town whose population was counted in two years."""
        name, country = next(self.names), self.rng.choice(self.world.countries).name
        early, late = sorted(self.rng.sample(YEARS, 2))
        old, new = self.population(), self.population()
        documents = []
        for year, number in ((early, old), (late, new)):
            text = f"In {year} {name} in {country} had a population of {number}."
            title = f"{name} {year}"
            documents.append(Document.from_title(ident("census", title), title, text))
        return self.outdated(name, documents, old, new, f"{late} is later than {early}.")

    def corrected(self) -> Task:
        """Return a question about a town whose number another document replaces."""
        city = self.town(next(self.names), self.rng.choice(self.world.countries))
        name, old, new = city.name, str(city.population), self.population()
        text = self.rng.choice(NOTICES).format(name=name, old=old, new=new)
        notice = Document.from_title(ident("notice", name), f"{name} population", text)
        documents = [town_document(city), notice]
        return self.outdated(name, documents, old, new, f"The number {old} is outdated.")

    def outdated(
        self, name: str, documents: list[Document], old: str, new: str, thought: str
    ) -> Task:
        """Return a question for the newer of two numbers."""
        self.rng.shuffle(documents)
        text = self.rng.choice(NOW).format(name=name)
        searches = population_of(name, documents)
        return Task(Kind.OUTDATED, text, (new,), name, searches, thought, old)

    def town(self, name: str, country: Country) -> City:
        """Return a town with a random population."""
        return City(name, int(self.population()), country)

    def population(self) -> str:
        """Return a number of five or six digits."""
        return str(self.rng.randrange(10_000, 10 ** self.rng.choice((5, 6))))


def searches_along(steps: Sequence[str], question: Question) -> tuple[Search, ...]:
    """Return the searches for a chain of entities, whose last one has the fact."""
    searches = []
    for turn, (query, document) in enumerate(question.plan):
        thought = f"I need to look up {steps[turn]}."
        if turn:
            asked = query.removeprefix(f"{steps[turn]} ")
            thought = f"{steps[turn - 1]} lies in {steps[turn]}. Now its {asked}."
        searches.append(Search(thought, query, (document,)))
    return tuple(searches)


def population_of(name: str, documents: Sequence[Document]) -> tuple[Search, ...]:
    """Return the search for the population of a town."""
    return (Search(f"I need to look up {name}.", f"{name} population", tuple(documents)),)


def town_document(city: City, more: str = "") -> Document:
    """Return a town's passage and `more`, with an id that no namesake in another country has."""
    text = city.passage.text + more
    return Document.from_title(ident("town", f"{city.name} {city.country.name}"), city.name, text)


def ident(kind: str, name: str) -> str:
    """Return the id of a document."""
    return f"{kind}-{name}".lower().replace(" ", "-")


def invented_names(taken: set[str]) -> Iterator[str]:
    """Yield names of two or three syllables, each once, without the words that are taken."""
    rng, used = random.Random("hard-names"), set(taken)
    while True:
        syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3))))
        word = "".join(syllables) + rng.choice(("", "l", "n", "r"))
        if word not in used:
            used.add(word)
            yield word.capitalize()
