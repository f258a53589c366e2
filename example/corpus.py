"""The passages of the example world: one a city, one a country and fact; no questions here."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from example.world import City, Country, World
from search_r1.search.schema import Document


class Fact(StrEnum):
    """A numeric fact about a country; the value is how passages and queries name it."""

    CALLING_CODE = "calling code"
    ISO_NUMBER = "ISO number"
    AREA = "area"
    DENSITY = "population density"

    def of(self, country: Country) -> str:
        """The fact's value for a country, in the digits that the passage shows."""
        values = {
            Fact.CALLING_CODE: country.calling_code,
            Fact.ISO_NUMBER: country.iso_number,
            Fact.AREA: str(country.area),
            Fact.DENSITY: str(country.density),
        }
        return values[self]

    @property
    def unit(self) -> str:
        """The words after the number in the passage, with the space; empty where none."""
        units = {Fact.AREA: " square km", Fact.DENSITY: " people per square km"}
        return units.get(self, "")


def city_id(city: City) -> str:
    """The id of a city's passage."""
    return f"city-{city.name.lower()}"


def fact_id(country: Country, fact: Fact) -> str:
    """The id of the passage that holds one fact about a country."""
    return f"{country.name}-{fact.value}".lower().replace(" ", "-")


def build_passages(world: World) -> list[Document]:
    """All passages: country facts first, then cities, each in alphabetical order."""
    return [*_country_passages(world), *map(_city_passage, world.cities)]


def write_corpus(passages: list[Document], path: Path) -> None:
    """Write one JSON object a line, `{"id", "contents"}`, ASCII, with a final newline."""
    rows = ({"id": passage.id, "contents": passage.contents} for passage in passages)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


def _country_passages(world: World) -> Iterator[Document]:
    """Each country's facts, one passage a fact."""
    for country in world.countries:
        for fact in Fact:
            title = f"{country.name} {fact.value}"
            text = f"The {fact.value} of {country.name} is {fact.of(country)}{fact.unit}."
            yield Document.from_title(fact_id(country, fact), title, text)


def _city_passage(city: City) -> Document:
    """A city's country and population."""
    text = f"{city.name} is a city in {city.country.name}. Its population is {city.population}."
    return Document.from_title(city_id(city), city.name, text)
