"""The oracle: questions, and reworded ones, find the passages of their row."""

import json
from pathlib import Path
from typing import Any

import pytest

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.diagnostics import normalise
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import Document, fingerprint
from search_r1.retrieval.settings import DiagnosticConfig, RetrieverConfig

ROWS: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "ids": ["d0", "d1"]},
    {
        "question": "Who composed the Blue Danube?",
        "documents": [{"id": 7, "contents": '"Strauss"\nJohann Strauss wrote the famous waltz.'}],
    },
    {"question": "Which capital lies on both banks?", "ids": ["d7", "d2", "d0"]},
    {"question": "what is the  CAPITAL of france", "ids": ["d1", "d7"]},
    {"question": "???", "ids": ["d3"]},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def open_oracle(path: Path, corpus_path: Path | None) -> Retriever:
    diagnostics = DiagnosticConfig(oracle_path=str(path))
    corpus = None if corpus_path is None else str(corpus_path)
    return build_retriever(RetrieverConfig("oracle", corpus, diagnostics=diagnostics))


@pytest.fixture
def oracle(tmp_path: Path, corpus_path: Path) -> Retriever:
    """Open the oracle for ROWS and the small corpus."""
    return open_oracle(write(tmp_path / "oracle.jsonl", ROWS), corpus_path)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("What is the capital of France?", ["d0", "d1", "d7"]),  # two rows have this question
        ("what is the capital of france", ["d0", "d1", "d7"]),
        ("Which capital lies on both banks?", ["d7", "d2", "d0"]),  # in the order of the file
        ("composer Blue Danube", ["7"]),
        ("famous Strauss waltz", ["7"]),  # words of the passage only
        ("France's capital city on the Seine", ["d0", "d1", "d7"]),
        ("???", ["d3"]),
        ("quokka", []),
        ("the of", []),
        ("", []),
    ],
)
def test_finds_the_passages_of_its_row(oracle: Retriever, query: str, expected: list[str]) -> None:
    """An equal question decides, else BM25 over question and passages; no match finds nothing."""
    hits = oracle.search([query], 9)[0]
    assert [hit.document.id for hit in hits] == expected
    assert [hit.score for hit in hits] == [1 / rank for rank in range(1, len(hits) + 1)]
    assert oracle.search([query], 2)[0] == hits[:2]


def test_an_exact_question_beats_a_better_score(tmp_path: Path) -> None:
    """A query finds the row with the same question even if BM25 ranks another row higher."""
    rows = [
        {"question": "longest river", "documents": [{"id": "a", "contents": "Nile"}]},
        {"question": "river river", "documents": [{"id": "b", "contents": "longest river river"}]},
    ]
    engine = open_oracle(write(tmp_path / "rows", rows), None)
    assert engine.search(["Longest River!"], 1)[0][0].document.id == "a"


def test_a_row_without_question_does_not_match_everything(tmp_path: Path) -> None:
    """A query without a match finds nothing, also if a row's question is empty."""
    rows = [{"question": "", "documents": [{"id": "a", "contents": "Nile"}]}]
    engine = open_oracle(write(tmp_path / "rows", rows), None)
    assert engine.search(["quokka"], 1) == [[]]


def test_documents_come_as_written(oracle: Retriever) -> None:
    """Passages in a row and passages looked up by id have all four fields."""
    found = [hits[0].document for hits in oracle.search(["composer Blue Danube", "???"], 1)]
    assert found[0] == Document(
        "7",
        "Strauss",
        "Johann Strauss wrote the famous waltz.",
        '"Strauss"\nJohann Strauss wrote the famous waltz.',
    )
    assert found[1].title == "Twin"
    assert oracle.num_documents == 6


def test_facts_follow_the_passages(tmp_path: Path, corpus_path: Path) -> None:
    """The fingerprint is the same for equal rows in two files, and differs for other rows."""
    engines = [
        open_oracle(write(tmp_path / name, rows), corpus_path)
        for name, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[1:]))
    ]
    fingerprints = [fingerprint(engine.info()) for engine in engines]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_normalise_keeps_texts_without_words() -> None:
    """Case, width, punctuation and spaces are removed; a text without words is kept."""
    assert normalise(" Who  wrote ＡＢＣ-42? ") == "who wrote abc 42"
    assert normalise(" ?! ") == "?!"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "not an object"),
        ({"ids": ["d0"]}, "KeyError 'question'"),
        ({"question": "q"}, "KeyError 'ids'"),
        ({"question": 3, "ids": []}, "question is int"),
        ({"question": "q", "ids": "d0"}, "ids is str"),
        ({"question": "q", "ids": [None]}, "neither text nor integers"),
        ({"question": "q", "documents": [{"id": "1"}]}, "KeyError"),
    ],
)
def test_malformed_rows_are_named(
    tmp_path: Path, corpus_path: Path, row: Any, message: str
) -> None:
    """The error has the line number, the problem and the expected form."""
    path = write(tmp_path / "rows", [ROWS[0], row])
    with pytest.raises(SetupError, match=f"line 2: .*{message}.*expected"):
        open_oracle(path, corpus_path)


def test_missing_inputs_are_named(tmp_path: Path, corpus_path: Path) -> None:
    """A missing flag, file, row, corpus or document id is an error that names it."""
    with pytest.raises(SetupError, match="--oracle_path"):
        build_retriever(RetrieverConfig("oracle"))
    with pytest.raises(SetupError):
        open_oracle(tmp_path / "nowhere", corpus_path)
    with pytest.raises(SetupError):
        open_oracle(write(tmp_path / "none", []), corpus_path)
    path = write(tmp_path / "rows", ROWS)
    with pytest.raises(SetupError, match="--corpus_path"):
        open_oracle(path, None)
    path = write(tmp_path / "rows", [{"question": "q", "ids": ["d0", "x9"]}])
    with pytest.raises(SetupError, match=r"1 ids .* in no row of .*: x9"):
        open_oracle(path, corpus_path)
