"""`search-r1 data audit` with a real retrieval server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from search_r1.datasets.command import build
from search_r1.retrieval.local_server import LocalServer
from tests.datasets.collection import write_jsonl

PASSAGES = [
    '"Togo"\nThe capital of Togo is Lomé; its neighbour is Ghana.',
    '"Ghana"\nGhana is a country on the Gulf. Its largest city is Kumasi.',
    '"Benin"\nBenin has Porto-Novo and Cotonou.',
]
QUESTIONS: list[dict[str, Any]] = [
    {"question": "What is the capital of Togo?", "golden_answers": ["Lomé"], "level": 1},
    {"question": "Largest city of the neighbour of Togo?", "golden_answers": ["Kumasi"]},
    {"question": "Which city of Togo lies at sea?", "golden_answers": ["Cotonou"]},
    {"question": "Which king ruled Togo?", "golden_answers": ["Nobody Known"]},
    {"question": "Is Togo in Africa?", "golden_answers": ["yes"]},
]
EVIDENCE = ["topk", "linked", "corpus", "nowhere", "unknown"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus and questions, raw and as rows of a question file."""
    folder = tmp_path_factory.mktemp("audit")
    rows = [{"id": str(i), "contents": text} for i, text in enumerate(PASSAGES)]
    write_jsonl(folder / "corpus.jsonl", list(rows))
    questions = write_jsonl(folder / "raw.jsonl", list(QUESTIONS))
    out = ["--local_dir", str(folder / "rows"), "--test_share", "0"]
    assert build("own_questions", [str(questions), *out]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    """Run a BM25 server for the corpus."""
    with LocalServer(["--corpus_path", str(folder / "corpus.jsonl")]) as running:
        yield running


def audit(folder: Path, server: LocalServer, *arguments: str) -> int:
    """Audit with one document for each question."""
    corpus = ["--corpus_path", str(folder / "corpus.jsonl"), "--topk", "1"]
    return build("audit", [*arguments, *corpus, "--retriever_url", server.url])


def test_columns_are_added_to_rows_and_to_raw_questions(
    folder: Path, server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows keep their columns, in both formats; the table has the shares without yes/no."""
    files = [str(folder / "raw.jsonl"), str(folder / "rows" / "train.parquet")]
    assert audit(folder, server, *files, "--local_dir", str(tmp_path)) == 0
    raw = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert [row["evidence"] for row in raw] == EVIDENCE
    assert [row["evidence_rank"] for row in raw] == [1, None, None, None, None]
    assert [row["answer_kind"] for row in raw] == ["span"] * 4 + ["yes_no"]
    before = pyarrow.parquet.read_table(files[1])
    after = pyarrow.parquet.read_table(tmp_path / "train.parquet")
    assert after.drop_columns(["answer_kind", "evidence", "evidence_rank"]).equals(before)
    of_rows = dict(zip(after["question"].to_pylist(), after["evidence"].to_pylist(), strict=True))
    expected = {q["question"]: e for q, e in zip(QUESTIONS, EVIDENCE, strict=True)}
    assert of_rows == expected  # the order of a built file is its own
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells == ["| raw", "10", "2", "0", "25.0", "25.0", "25.0", "25.0 |"]


def test_an_audited_file_is_audited_again(
    folder: Path, server: LocalServer, tmp_path: Path
) -> None:
    """Old columns are replaced; a file is not overwritten by its own audit."""
    rows = folder / "rows" / "train.parquet"
    assert audit(folder, server, str(rows), "--local_dir", str(tmp_path / "a")) == 0
    first = tmp_path / "a" / "train.parquet"
    assert audit(folder, server, str(first), "--local_dir", str(tmp_path / "b")) == 0
    again = pyarrow.parquet.read_table(tmp_path / "b" / "train.parquet")
    assert again.equals(pyarrow.parquet.read_table(first))
    assert audit(folder, server, str(first), "--local_dir", str(tmp_path / "a")) == 2


def test_a_server_of_another_corpus_is_refused(
    folder: Path, server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server finds must be in the corpus that is scanned."""
    other = write_jsonl(tmp_path / "other.jsonl", [{"id": "0", "contents": '"Togo"\nElsewhere.'}])
    arguments = ["--corpus_path", str(other), "--retriever_url", server.url]
    assert build("audit", [str(folder / "raw.jsonl"), *arguments]) == 2
    assert server.url in capsys.readouterr().err


def test_rows_without_their_question_are_refused(
    folder: Path, server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt alone does not say what is asked; the row is named."""
    row = {"prompt": "Think. Who?", "data_source": "s", "reward_model": {"ground_truth": "a"}}
    file = write_jsonl(tmp_path / "rows.jsonl", [row])
    assert audit(folder, server, str(file), "--local_dir", str(tmp_path / "out")) == 2
    assert "extra_info.question" in capsys.readouterr().err
