"""The committed example data: no leak into validation, and questions that the code makes again."""

import json
import re
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import pandas as pd
import pytest

from example.geography import CORPUS, DATA, build_questions, is_validation, training_world
from search_r1.retrieval.schema import Document
from search_r1.retrieval.tokenization import tokenize

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
