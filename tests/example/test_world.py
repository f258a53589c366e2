"""The committed example data: no leak into validation, no shortcuts, imperfect demonstrations."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import pandas as pd
import pytest

from example.geography import CORPUS, DATA, build_questions, is_validation, training_world
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.schema import Document
from search_r1.retrieval.tokenization import tokenize

SEARCH = re.compile(r"<think> ([^<]+) </think> <search> ([^<]+) </search>")
ANSWER = re.compile(r"<think> ([^<]+) </think> <answer> (\d+) </answer>")
Row = dict[str, Any]


class Ranking:
    """BM25 over the corpus with bm25s alone; equal scores rank in the order of the passages."""

    def __init__(self, passages: Sequence[Document]) -> None:
        self.passages = passages
        self.index = bm25s.BM25()
        self.index.index(tokenize([p.contents for p in passages]), show_progress=False)

    def search(self, query: str, topk: int = 1) -> list[Document]:
        ids = self.index.get_tokens_ids(tokenize([query])[0])
        rows = np.argsort(-self.index.get_scores_from_ids(ids), kind="stable")
        return [self.passages[row] for row in rows[:topk]]


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    rows = [json.loads(line) for line in CORPUS.read_text(encoding="ascii").splitlines()]
    return Ranking([Document.from_contents(row["id"], row["contents"]) for row in rows])


@pytest.fixture(scope="module")
def halves() -> dict[str, list[Row]]:
    return {n: pd.read_parquet(DATA / f"{n}.parquet").to_dict("records") for n in ("train", "val")}


@pytest.fixture(scope="module")
def demonstrations() -> list[Row]:
    return [json.loads(line) for line in (DATA / "sft.jsonl").read_text().splitlines()]


def question_of(row: Row) -> str:
    return str(row["extra_info"]["question"])


def texts_of(row: Row, origin: str) -> list[str]:
    """Return the texts of one origin in a demonstration."""
    return [part["text"] for part in row["segments"] if part["origin"] == origin]


def test_the_corpus_is_in_wiki_form(ranking: Ranking) -> None:
    """Each passage has a unique id, a quoted title and a sentence."""
    assert len({passage.id for passage in ranking.passages}) == len(ranking.passages) > 4000
    assert all(passage.title and passage.text.endswith(".") for passage in ranking.passages)


def test_capitals_are_found(ranking: Ranking) -> None:
    """BM25 finds the passages of a capital and of a small town."""
    assert "Beijing" in ranking.search("What is the capital of China?")[0].text
    assert "Its population is" in ranking.search("Gorongosa population")[0].text


def test_rows_have_the_search_r1_columns(halves: dict[str, list[Row]]) -> None:
    """The files have all columns of Search-R1, consecutive indexes and no repeated question."""
    for split, count in (("train", 2000), ("val", 120)):
        rows = halves[split]
        assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [row["extra_info"]["index"] for row in rows] == list(range(count))
        assert {row["extra_info"]["split"] for row in rows} == {split}
        assert all(len(row["prompt"]) == 1 for row in rows)
        assert len({question_of(row) for row in rows}) == count


def test_no_validation_entity_occurs_in_any_training_text(
    ranking: Ranking, halves: dict[str, list[Row]], demonstrations: list[Row]
) -> None:
    """Validation entities occur in no training prompt and in no demonstration."""
    hidden = set()
    for passage in ranking.passages:
        match = re.fullmatch(r"(\w+) is a city in (.+)\. Its .*", passage.text)
        if match and is_validation(match[2]):
            hidden |= {match[1], match[2]}
    assert len(hidden) > 900
    texts = [question_of(row) for row in halves["train"]]
    texts += [part["text"] for row in demonstrations for part in row["segments"]]
    text = " ".join(texts)
    words = set(re.findall(r"\w+", text))
    assert not {name for name in hidden if (name in text if " " in name else name in words)}


def test_the_training_questions_are_made_by_this_code(halves: dict[str, list[Row]]) -> None:
    """All training questions of one search can be generated again by this code."""
    generated = {q.text: q for q in build_questions(training_world(), seed=0) if len(q.plan) == 1}
    single = [row for row in halves["train"] if row["data_source"] == "geo_single"]
    assert {question_of(row) for row in single} == set(generated)
    for row in single:
        target = row["reward_model"]["ground_truth"]["target"]
        assert tuple(target) == generated[question_of(row)].answers


def test_planned_searches_find_and_one_search_is_not_enough(
    ranking: Ranking, halves: dict[str, list[Row]]
) -> None:
    """Planned queries find their passages; the question itself as a query does not suffice."""
    for question in build_questions(training_world(), seed=0)[:200]:
        for query, passage in question.plan:
            assert ranking.search(query) == [passage]
    countries = {p.title: p.text.split(" is a city in ")[1].partition(".")[0]
                 for p in ranking.passages if " is a city in " in p.text}  # fmt: skip
    two_hop = [row for row in halves["val"] if row["data_source"] == "geo_two_hop"]
    for text in map(question_of, two_hop):
        (country,) = {countries[word] for word in re.findall(r"\w+", text) if word in countries}
        titles = [passage.title for passage in ranking.search(text, topk=3)]
        assert country not in text and not any(title.startswith(country) for title in titles)


def test_no_answer_is_frequent(halves: dict[str, list[Row]]) -> None:
    """Always giving the most frequent validation answer scores below 5 %."""
    targets = [row["reward_model"]["ground_truth"]["target"] for row in halves["val"]]
    counts = Counter(answer for target in targets for answer in target)
    assert max(counts.values()) < 0.05 * len(targets)


def test_demonstrations_are_well_formed_and_about_training_questions(
    ranking: Ranking, halves: dict[str, list[Row]], demonstrations: list[Row]
) -> None:
    """Demonstrations have searches, each with the results of BM25, and then one answer."""
    prompts = {row["prompt"][0]["content"] for row in halves["train"]}
    for row in demonstrations:
        *searches, last = texts_of(row, "policy")
        queries = [SEARCH.fullmatch(text) for text in searches]
        assert all(queries) and ANSWER.fullmatch(last)
        expected = [TEMPLATES["short"].observation(ranking.search(q[2])) for q in queries if q]
        assert expected == texts_of(row, "observation")
        assert row["prompt"][0]["content"] in prompts


def test_demonstrations_search_too_little(
    halves: dict[str, list[Row]], demonstrations: list[Row]
) -> None:
    """Demonstrations with all searches are right, the others are wrong, so RL can improve."""
    rows = {row["prompt"][0]["content"]: row for row in halves["train"]}
    thorough: Counter[str] = Counter()
    for demonstration in demonstrations:
        row = rows[demonstration["prompt"][0]["content"]]
        answer = ANSWER.fullmatch(texts_of(demonstration, "policy")[-1])
        is_right = answer is not None and answer[2] in row["reward_model"]["ground_truth"]["target"]
        is_thorough = len(texts_of(demonstration, "observation")) == row["extra_info"]["hops"]
        assert is_right == is_thorough
        thorough[row["data_source"]] += is_thorough
    assert thorough == {"geo_single": 105, "geo_two_hop": 50}
