"""A corpus whose rows have fields, and which of its passages a filter leaves, row by row."""

import json
import random
from pathlib import Path
from typing import Any

from search_r1.retrieval.engines.base import Filter, Retriever
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.service.filtering import read_filter
from search_r1.retrieval.service.requests import RetrieveRequest

NAMES = ("year", "tags", "source", "checked")
NUM_ROWS = 150
WORDS = ["river", "capital", "city", "danube", "waltz", "twin", "bank", "hill"]
TAGS = ["red", 'q"uo\\te', "北京 ' x", "a=b", "10"]
FILTERS: list[dict[str, Any]] = [
    {"year": 1990},
    {"year": [1990, 1993.0, 1994, 7]},
    {"tags": "red"},
    {"tags": TAGS[1:]},
    {"tags": ["red", "10"], "year": [1990, 1991, 1992], "checked": True},
    {"source": 0.5},
    {"source": "0.5"},
    {"source": False},
    {"checked": 1},
    {"year": "1990"},
]
"""The last two leave nothing: a bool is no number, and a number is no text."""
QUERIES = ["river capital", "danube waltz twin", "city", "hill bank river city", "absent", ""]


def write_with_fields(path: Path) -> list[dict[str, Any]]:
    """Write the corpus and return its rows; every tenth has no fields, or null."""
    draw, rows = random.Random(0), []
    for number in range(NUM_ROWS):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        row: dict[str, Any] = {"id": f"d{number}", "contents": f'"T{number % 7}"\n{text}'}
        if number % 10:
            row |= {
                "year": draw.randint(1990, 1995),
                "tags": draw.sample(TAGS, draw.randint(0, 3)),
                "source": draw.choice([0.5, "0.5", False, 3.0, None]),
                "checked": draw.random() < 0.5,
            }
        rows.append(row)
    path.write_text("\n".join(map(json.dumps, rows)))
    return rows


def filter_of(value: Any) -> Filter:
    return read_filter(RetrieveRequest(queries=[], filter=value), NAMES)


def is_left(row: dict[str, Any], filter: dict[str, Any]) -> bool:
    """Whether a row has one of the values of each field: of equal value, and a bool alike."""
    return all(
        any(
            own == value and isinstance(own, bool) == isinstance(value, bool)
            for own in _listed(row.get(name))
            for value in _listed(values)
        )
        for name, values in filter.items()
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def best_left(
    engine: Retriever, rows: list[dict[str, Any]], filter: dict[str, Any], k: int
) -> list[list[Hit]]:
    """Return what remains of all passages that an engine ranks."""
    left = {row["id"] for row in rows if is_left(row, filter)}
    ranked = engine.search(QUERIES, NUM_ROWS)
    return [[hit for hit in hits if hit.document.id in left][:k] for hits in ranked]
