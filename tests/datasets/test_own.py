"""A user's own questions: csv and jsonl, divided into splits by their words."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from search_r1.datasets.command import OwnOptions, build
from search_r1.datasets.own import assign_splits, read_files
from search_r1.datasets.question import Question, RecordLocation, as_question
from verl.data.records import BadRow
from verl.data.validation import validate

main = partial(build, "own_questions")


def read(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


def question(text: str, split: str = "") -> Question:
    """Return a question without answers, for the tests of splits."""
    return Question(text, text, (), "own", split, RecordLocation("f", 0, "own", split))


def test_csv_becomes_rows(tmp_path: Path) -> None:
    """Quotes, commas, line breaks and several answers of a csv are read as in a spreadsheet."""
    text = '\ufeffquestion,answer\n"Who, then?",Ada|Lady  Lovelace\n"Say ""so"" now"," yes\n"\n'
    (tmp_path / "trivia.csv").write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    assert main([str(tmp_path / "trivia.csv"), "--local_dir", str(out), "--test_share", "0"]) == 0
    rows = read(out / "train.parquet")
    assert [(row["question"], row["golden_answers"]) for row in rows] == [
        ("Who, then?", ["Ada", "Lady  Lovelace"]),
        ('Say "so" now?', ["yes"]),
    ]
    assert [(row["id"], row["data_source"]) for row in rows] == [
        ("trivia_0", "trivia"), ("trivia_1", "trivia"),
    ]  # fmt: skip
    assert [file.name for file in out.iterdir()] == ["train.parquet"]
    assert validate([str(out / "train.parquet")]).is_sound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\na,b,c\nd,\n,e\n", "3 bad rows"),
        ("question,answer\na,b,c\n", "row 0 (counted from 0): got further fields ['c']"),
        ("question,answer\nx,y\na,b,c\n", "around fields that hold commas (line 3)"),
        ("question,answer\nx,y\nd\n", "row 1 (counted from 0), answer: got [None]"),
        (
            "query,answer\nx,y\n",
            "got columns query, answer, expected a column question; fix: rename the column query",
        ),
        ("", "got columns (none)"),
        ('question,answer\n"x,y\n', "expected a csv file"),
        ("question,answer\n", "got no rows"),
        ("question,answer,split\na,b,../../x\n", "split: got '../../x', expected letters"),
        ("question,answer,split\na,b,/tmp/x\n", "split: got '/tmp/x', expected letters"),
        ("question,answer,split\na,b,..\n", "split: got '..', expected letters"),
        ("question,answer,data_source\na,b,\x1b[2J\n", "expected a printable name"),
    ],
)
def test_an_unusable_csv_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """Errors in a csv are reported with the row, and nothing is written."""
    (tmp_path / "q.csv").write_text(text)
    assert main([str(tmp_path / "q.csv"), "--local_dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_with_own_splits_and_sets(tmp_path: Path) -> None:
    """Rows keep their set, split and id; further scalar values are in extra_info."""
    rows = [
        {"id": "nq_a", "question": "a", "golden_answers": ["1"], "data_source": "nq",
         "split": "train", "answer_in_corpus": True, "origin": "contexts"},
        {"id": "musique_b", "question": "b?", "golden_answers": ["2"], "data_source": "musique",
         "split": "train", "answer_in_corpus": False, "origin": "matched"},
        {"id": "nq_c", "question": "c?", "golden_answers": ["3", "4"], "data_source": "nq",
         "split": "dev", "answer_in_corpus": True, "origin": "contexts"},
    ]  # fmt: skip
    files = [write(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(rows)]
    assert main([*files, "--local_dir", str(tmp_path / "all")]) == 0
    train, dev = (read(tmp_path / "all" / f"{split}.parquet") for split in ("train", "dev"))
    assert [row["id"] for row in [*train, *dev]] == ["nq_a", "musique_b", "nq_c"]
    assert dev[0]["extra_info"] == {
        "answer_in_corpus": True, "origin": "contexts", "split": "dev", "index": 0,
        "id": "nq_c", "question": "c?", "source_split": "dev",
    }  # fmt: skip
    assert main([*files, "--local_dir", str(tmp_path / "nq"), "--data_sources", "nq"]) == 0
    assert [row["id"] for row in read(tmp_path / "nq" / "train.parquet")] == ["nq_a"]


def write_questions(path: Path, num: int, **columns: str) -> str:
    """Write questions with the file's name in their words."""
    name = path.stem
    rows = [{"question": f"{name} {n}", "answer": "b", **columns} for n in range(num)]
    return write(path, rows)


def splits_of(folder: Path) -> dict[str, Counter[str]]:
    """Return the first words of the questions in each file that was written."""
    return {path.name: Counter(row["question"].split()[0] for row in read(path))
            for path in folder.glob("*.parquet")}  # fmt: skip


def test_the_names_of_several_files_are_their_splits(tmp_path: Path) -> None:
    """As a column would be; the questions of one file, or of other names, are divided."""
    train = write_questions(tmp_path / "train.jsonl", 30)
    dev = write_questions(tmp_path / "Dev.jsonl", 30)
    own = write_questions(tmp_path / "own.jsonl", 10, split="test")
    assert main([train, dev, own, "--local_dir", str(tmp_path / "all")]) == 0
    assert splits_of(tmp_path / "all") == {
        "train.parquet": {"train": 30}, "dev.parquet": {"Dev": 30}, "test.parquet": {"own": 10},
    }  # fmt: skip
    assert read(tmp_path / "all" / "dev.parquet")[0]["extra_info"]["source_split"] == "dev"
    assert main([train, dev, "--split", "test", "--local_dir", str(tmp_path / "one")]) == 0
    assert splits_of(tmp_path / "one") == {"test.parquet": {"train": 30, "Dev": 30}}
    assert main([train, "--local_dir", str(tmp_path / "divided")]) == 0
    assert splits_of(tmp_path / "divided") == {
        "train.parquet": {"train": 27}, "test.parquet": {"train": 3},
    }  # fmt: skip


def test_files_of_which_some_name_a_split_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The questions of the other one would be divided into the files of these."""
    files = [write_questions(tmp_path / f"{name}.jsonl", 9) for name in ("dev", "more")]
    out = tmp_path / "out"
    assert main([*files, "--local_dir", str(out)]) == 2
    assert f"got {files[1]} without splits beside {files[0]}," in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_set_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error for an unknown set lists the sets of the files."""
    file = write(tmp_path / "q.jsonl", [{"question": "a", "answer": "b"}])
    assert main([file, "--data_sources", "nq", "--local_dir", str(tmp_path / "out")]) == 2
    assert "got nq, expected sets of the files: q" in capsys.readouterr().err


def test_further_columns_of_mixed_types_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A further column with numbers and texts is an error."""
    rows = [
        {"question": f"q{n}", "answer": "b", "level": level} for n, level in enumerate([1, "x"])
    ]
    file = write(tmp_path / "q.jsonl", rows)
    assert main([file, "--test_share", "0", "--local_dir", str(tmp_path / "out")]) == 2
    assert "give each further column one type" in capsys.readouterr().err


def test_splits_depend_only_on_words() -> None:
    """Questions with the same words get the same split, in any order."""
    questions = [question(f"what is {n}?") for n in range(50)]
    again = [question(f"What is {n} ?") for n in reversed(range(50))]
    splits = {q.key: q.split for q in assign_splits(questions, 0.2)}
    assert sorted(splits.values()).count("test") == 10
    assert {q.key: q.split for q in assign_splits([*again, *questions], 0.2)} == splits
    assert {q.key: q.split for q in assign_splits(questions, 0.2, seed=1)} != splits
    assert [q.split for q in assign_splits([question("x", "dev")], 0.5)] == ["dev"]


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_an_impossible_share_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    """A share outside [0, 1), and a single question for two files, are errors."""
    file = write(tmp_path / "q.jsonl", [{"question": "a", "answer": "b"}])
    out = ["--local_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        main([file, "--test_share", str(share), *out])
    assert main([file, "--test_share", "0.5", *out]) == 2
    error = capsys.readouterr().err
    assert f"--test-share: got {share}, expected 0 or more, less than 1" in error
    assert "0.5 of 1 different questions" in error


@pytest.mark.parametrize(
    "text",
    [
        "中国的首都是哪里？",
        "ما هي العاصمة؟",
        "Ποιος;",
        "Որտե՞ղ",
        'Who said "why?"',
        "Name it.",
        "Go!",
    ],
)
def test_a_finished_sentence_gets_no_question_mark(text: str) -> None:
    """Question marks of other scripts and other ends of a sentence are left alone."""
    assert as_question(f" {text}\n") == text
    assert as_question("Who wrote it") == "Who wrote it?"


def test_line_31_cells_with_lists_and_aliases(tmp_path: Path) -> None:
    """A list in a csv field, PopQA's JSON text, and MuSiQue's aliases are all accepted answers."""
    cells = tmp_path / "q.csv"
    cells.write_text("question,answer\nwho,\"['Jane Austen', 'J. Austen']\"\nq2,a|b\n")
    popqa = write(tmp_path / "p.jsonl", [{"question": "who", "possible_answers": '["a", "b"]'}])
    musique = write(
        tmp_path / "m.jsonl",
        [{"question": "m", "answer": "a", "answer_aliases": ["b", "a"], "answerable": True},
         {"question": "n", "answer": "a", "answer_aliases": [], "answerable": False}],
    )  # fmt: skip
    options = OwnOptions(files=(cells, Path(popqa), Path(musique)))
    found = list(read_files(options))
    assert [q.answers for q in found if not isinstance(q, BadRow)] == [
        ("Jane Austen", "J. Austen"), ("a", "b"), ("a", "b"), ("a", "b")]  # fmt: skip
    assert [row.number for row in found if isinstance(row, BadRow)] == [1]
