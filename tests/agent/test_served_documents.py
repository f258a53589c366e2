"""What preflight sees in the documents that a server gives for the questions of a run."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.retriever import build_search
from search_r1.agent.served_documents import questions_of
from search_r1.retrieval.schema import Document, Hit
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.apps import running
from verl.config import Config
from verl.errors import ToolRefused

Find = Callable[[str], Sequence[Document]]


@dataclass
class Backend:
    """Serves what a function finds."""

    find: Find
    num_documents: int = 5000
    name: str = "fake"
    num_threads: int = 1

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit(document, 1.0) for document in self.find(query)] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"engine": self.name}


def rows(answer: str = "Author {}", count: int = 20) -> list[dict[str, Any]]:
    return [
        {"data_source": "nq", "extra_info": {"question": f"Who wrote book {i}?"},
         "prompt": [{"role": "user", "content": "q"}],
         "reward_model": {"ground_truth": {"target": [answer.format(i)]}}}
        for i in range(count)
    ]  # fmt: skip


def config_for(folder: Path, content: list[dict[str, Any]]) -> Config:
    """Return options of a run whose validation rows are these; there are no training files."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    config = Config()
    config.data.val_files = str(file)
    return config


def library(query: str) -> list[Document]:
    """Find the book that a query names, with its author; anything for other queries."""
    book = query.removesuffix("?").split()[-1]
    return [Document.from_title(book, f"Book {book}", f"It is by author {book}, a writer.")]


def geography(query: str) -> list[Document]:
    return [Document.from_title(query, "Oslo", "Oslo is the capital of Norway.")]


def nothing_but_paris(query: str) -> list[Document]:
    return geography(query) if "capital" in query else []


def blank(query: str) -> list[Document]:
    return geography(query) if "capital" in query else [Document.from_title(query, "T", " ")]


def constant(query: str) -> list[Document]:
    return geography("always")


CASES: dict[str, tuple[Backend, list[dict[str, Any]], str, str]] = {
    "their corpus": (Backend(library), rows(), "", ""),
    "questions of two searches": (Backend(library), rows("Town {}"), "", ""),
    "another corpus": (Backend(geography), rows(), "", "0 of 20 questions of nq.*5000 documents"),
    "a toy corpus": (Backend(geography, 60), rows(), "0 of 20 questions of nq.*CORPUS_PATH", ""),
    "long answers": (Backend(geography, 60), rows("word " * 9 + "{}"), "", ""),
    "few questions": (Backend(geography, 60), rows(count=15), "", ""),
    "nothing": (Backend(nothing_but_paris), rows(count=4), "no document for any of 4", ""),
    "nothing, on purpose": (Backend(nothing_but_paris, name="empty"), rows(), "", ""),
    "no texts": (Backend(blank), rows(count=4), "4 of 4 documents without text", ""),
    "always the same": (Backend(constant), rows(count=4), "the same 1 documents for all", ""),
    "the only one": (Backend(constant, 1), rows(count=4), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_documents_for_the_questions_are_looked_at(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP: what no run can learn from is refused, what is doubtful gives a warning."""
    backend, content, refusal, warning = CASES[case]
    config = config_for(tmp_path, content)
    with running(create_app(backend, ServiceConfig())) as url:
        config.retriever.url = f"{url}/retrieve"
        with caplog.at_level(logging.WARNING):
            problems = list(build_search(config).preflight(30.0))
    assert [type(problem) for problem in problems] == [ToolRefused] * bool(refusal)
    for text, pattern in ((" ".join(map(str, problems)), refusal), (caplog.text, warning)):
        assert bool(text) is bool(pattern)
        assert not pattern or ("fix: " in text and re.search(pattern, text))


def test_questions_are_of_every_data_source_and_once(tmp_path: Path) -> None:
    """Bad rows, yes and no, and rows without a question are left out; so are unreadable files."""
    content = rows(count=40) + rows(count=2)
    content[1]["data_source"] = content[2]["data_source"] = "hotpotqa"
    content[1]["reward_model"]["ground_truth"] = "yes"
    content[3]["extra_info"] = {}
    content[4] = {}
    config = config_for(tmp_path, content)
    config.data.train_files = [str(tmp_path / "missing.parquet")]
    asked = questions_of(config.data)
    assert len({one.question for one in asked}) == len(asked)
    assert [one.source for one in asked].count("hotpotqa") == 1
    assert [one.source for one in asked].count("nq") == 32
