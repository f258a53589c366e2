"""The example's world in Chinese: nothing is left in English, and each search finds its passage."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from example.chinese import TEMPLATE, translate, write_world
from search_r1.agent.question import question_in
from search_r1.agent.tags import named_format
from search_r1.retrieval.engines.bm25 import open_retriever
from search_r1.retrieval.settings import RetrieverConfig

Row = dict[str, Any]
ENGLISH = re.compile(r"\b(?!ISO)[a-z]{2,}\b(?! ?[>\"(])|\b(?:What|How|Which|The|Its|Now|I)\b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chinese")
    write_world(folder)
    return folder


def test_the_world_is_in_chinese(folder: Path) -> None:
    """Only names of cities are in Latin letters; counts, answers and fields are the example's."""
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text("utf-8").splitlines()]
    val = pq.read_table(folder / "val.parquet").to_pylist()
    assert (len(rows), len(val)) == (400, 120)
    for row in (*rows, *val):
        prompt = row["prompt"][0]["content"]
        question = question_in(prompt)
        assert question and not ENGLISH.search(question)
        assert prompt == named_format(TEMPLATE).user_prompt(question)
        tags = re.sub(
            r"</?\w+>|Doc 1\(Title:", "", "".join(p["text"] for p in row.get("segments", ()))
        )
        assert not ENGLISH.search(tags)
    assert [row["extra_info"]["index"] for row in val] == list(range(120))


def test_each_search_finds_its_passage(folder: Path) -> None:
    """The first passage for each query of the demonstrations is the one that follows it there."""
    retriever = open_retriever(RetrieverConfig(corpus_path=str(folder / "corpus.jsonl")))
    assert retriever.info()["analyzer"] == "scripts"
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text("utf-8").splitlines()]
    template, expected = named_format(TEMPLATE), []
    queries: list[str] = []
    for row in rows:
        texts = [part["text"] for part in row["segments"]]
        for turn, observation in itertools.pairwise(texts):
            if query := re.search(r"<search> (.*) </search>", turn):
                queries.append(query[1])
                expected.append(observation)
    found = retriever.search(queries, 1)
    shown = [template.observation([hit.document for hit in hits]) for hits in found]
    assert len(queries) > 300 and shown == expected


def test_questions_of_two_searches_find_their_city(folder: Path) -> None:
    """The question itself, mostly of common characters, is as good a query as the city's name."""
    retriever = open_retriever(RetrieverConfig(corpus_path=str(folder / "corpus.jsonl")))
    rows = pq.read_table(folder / "val.parquet").to_pylist()
    asked = [row["extra_info"]["question"] for row in rows if "所在国家" in str(row["extra_info"])]
    found = retriever.search(asked, 3)
    cities = [question.partition("所在国家")[0] for question in asked]
    num_found = sum(
        city in [hit.document.title for hit in hits]
        for city, hits in zip(cities, found, strict=True)
    )
    assert len(asked) == 60 and num_found >= 0.95 * len(asked)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The area of Malta is 316 square km.", "马耳他的面积是316平方公里。"),
        (
            "How many people live on a square km of the country of Tela?",
            "Tela所在国家每平方公里有多少人？",
        ),
        ("Hong Kong calling code", "香港 国际区号"),
        ("Tela lies in Honduras. Now its area.", "Tela在洪都拉斯。再查面积。"),
    ],
)
def test_sentences(text: str, expected: str) -> None:
    assert translate(text) == expected
