"""The forms of question files that users have are read rightly, or refused with the fix."""

import datetime
import decimal
import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from search_r1.datasets.command import OwnOptions
from search_r1.datasets.own import read_files
from verl.data.records import BadRow
from verl.data.rows import load_rows
from verl.data.validation import validate
from verl.errors import DataError

Form = tuple[str, Callable[[Path], object]]
"""The file's name, and what writes it."""


def jsonl(name: str, *rows: Any, encoding: str = "utf-8", end: str = "\n") -> Form:
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    return name, lambda path: path.write_bytes(text.encode(encoding))


def text(name: str, content: str, encoding: str = "utf-8") -> Form:
    return name, lambda path: path.write_bytes(content.encode(encoding))


def packed(name: str, content: str) -> Form:
    return name, lambda path: path.write_bytes(gzip.compress(content.encode()))


def table(*rows: dict[str, Any]) -> Form:
    return "q.parquet", lambda path: pd.DataFrame(list(rows)).to_parquet(path)


def two_columns(path: Path) -> None:
    columns = [["who"], ["Ada"], ["Bob"]]
    pyarrow.parquet.write_table(
        pyarrow.table(columns, names=["question", "answer", "answer"]), path
    )


def stream(path: Path) -> None:
    rows = pyarrow.table({"question": ["who"], "answer": ["Ada"]})
    with pyarrow.ipc.new_stream(str(path), rows.schema) as writer:
        writer.write_table(rows)


def answer(value: object) -> Form:
    return table({"question": "who", "answer": value})


CSV = "question,answer\nwho,Ada\n"
ROW = {"question": "who", "answer": "Ada"}
HOTPOT = {"_id": "5a", "answer": "Ada", "question": "who", "type": "bridge", "level": "easy",
          "supporting_facts": [["A", 0]], "context": [["A", ["x"]]]}  # fmt: skip
TRIVIA = {"Value": "Ada", "Aliases": ["Ada", "Lovelace"], "NormalizedAliases": ["ada"]}
SQUAD = [{"paragraphs": [{"context": "x", "qas": [
    {"id": "1", "question": "who", "answers": [{"text": "Ada"}]}]}]}]  # fmt: skip
CELL = "['Ada', 'Lovelace']"
READ: dict[str, tuple[Form, tuple[str, ...]]] = {
    "FlashRAG": (jsonl("q.jsonl", {"id": "0", "question": "who", "golden_answers": ["Ada"],
                                   "metadata": {}}), ("Ada",)),
    "Search-R1's parquet": (table({"id": "train_0", "question": "who", "golden_answers": ["Ada"],
                                   "data_source": "nq", "ability": "x"}), ("Ada",)),
    "HotpotQA, a row a line": (jsonl("q.jsonl", HOTPOT), ("Ada",)),
    "HotpotQA of the hub": (table({"id": "5a", "question": "who", "answer": "Ada",
                                   "context": {"title": ["A"], "sentences": [["x"]]}}), ("Ada",)),
    "2WikiMultiHopQA": (jsonl("q.jsonl", {**HOTPOT, "context": '[["A", ["x"]]]', "evidences": []}),
                        ("Ada",)),
    "MuSiQue": (jsonl("q.jsonl", {"id": "2hop", "paragraphs": [{"idx": 0}], **ROW,
                                  "answer_aliases": ["Lovelace"], "answerable": True}),
                ("Ada", "Lovelace")),
    "PopQA's tsv": (text("q.tsv", 'id\tquestion\tpossible_answers\n1\twho\t"[""Ada"", ""L""]"\n'),
                    ("Ada", "L")),
    "TriviaQA, a row a line": (jsonl("q.jsonl", {"Question": "who", "Answer": TRIVIA}),
                               ("Ada", "Lovelace", "ada")),
    "TriviaQA of the hub": (jsonl("q.jsonl", {"question": "who", "answer": {
        "value": "Ada", "aliases": ["Ada", "L"], "normalized_aliases": [], "type": "W"}}),
        ("Ada", "L")),
    "ComplexWebQuestions": (jsonl("q.jsonl", {"question": "who", "answers": [
        {"answer_id": "m.0", "aliases": ["Lovelace"], "answer": "Ada"}]}), ("Ada", "Lovelace")),
    "aliases in a csv": (text("q.csv", "question,answer,aliases\nwho,Ada|A,L|Lady\n"),
                         ("Ada", "A", "L", "Lady")),
    "aliases of a list in a csv": (text("q.csv", f'question,answer,aliases\nwho,"{CELL}",L|A\n'),
                                   ("Ada", "Lovelace", "L", "A")),
    "Bamboogle": (text("q.csv", "Question,Answer\nwho,Ada\n"), ("Ada",)),
    "NQ-open": (jsonl("q.jsonl", {"question": "who", "answer": ["Ada"]}), ("Ada",)),
    "SQuAD of the hub": (table({"question": "who", "answers": {"text": ["Ada"],
                                                               "answer_start": [0]}}), ("Ada",)),
    "SQuAD's list of objects": (jsonl("q.jsonl", {"question": "who", "answers": [
        {"text": "Ada", "answer_start": 0}, {"text": "L", "answer_start": 3}]}), ("Ada", "L")),
    "a csv with a list as text": (text("q.csv", f'question,answer\nwho,"{CELL}"\n'),
                                  ("Ada", "Lovelace")),
    "a csv with NumPy's array": (text("q.csv", f'question,answer\nwho,"array({CELL})"'),
                                 ("Ada", "Lovelace")),
    "NumPy's scalars as text": (jsonl("q.jsonl", {**ROW, "answer": "[np.str_('Ada')]"}), ("Ada",)),
    "semicolons": (text("q.csv", "question;answer\nwho;Ada\n"), ("Ada",)),
    "Excel's separator line": (text("q.csv", "sep=;\nquestion;answer\nwho;Ada\n"), ("Ada",)),
    "tabs in a csv": (text("q.csv", "question\tanswer\nwho\tAda\n"), ("Ada",)),
    "spaces in the header": (text("q.csv", "Question, Answer\nwho, Ada\n"), ("Ada",)),
    "pandas' csv with its index": (text("q.csv", ",question,answer\n0,who,Ada\n"), ("Ada",)),
    "Excel's empty columns": (text("q.csv", "question,answer,,\nwho,Ada,,\n"), ("Ada",)),
    "a name in capitals": (text("Q.CSV", CSV), ("Ada",)),
    "jsonl in capitals": (jsonl("Q.JSONL", ROW), ("Ada",)),
    "a byte order mark, csv": (text("q.csv", CSV, "utf-8-sig"), ("Ada",)),
    "a byte order mark, jsonl": (jsonl("q.jsonl", ROW, encoding="utf-8-sig"), ("Ada",)),
    "Windows' line ends, csv": (text("q.csv", CSV.replace("\n", "\r\n")), ("Ada",)),
    "Windows' line ends, jsonl": (jsonl("q.jsonl", ROW, end="\r\n"), ("Ada",)),
    "old line ends": (text("q.csv", CSV.replace("\n", "\r")), ("Ada",)),
    "an integer": (answer(1994), ("1994",)),
    "pandas' integer with gaps": (answer(1994.0), ("1994",)),
    "an array": (answer(np.array(["Ada", "L"])), ("Ada", "L")),
    "a list with a gap": (answer(["Ada", None]), ("Ada",)),
}  # fmt: skip
REFUSED: dict[str, tuple[Form, str]] = {
    "HotpotQA's own array": (text("q.json", json.dumps([HOTPOT])), "python* -c"),
    "TriviaQA's own file": (text("q.json", json.dumps({"Data": [{"Question": "who",
                            "Answer": TRIVIA}]})), "python* -c"),
    "SQuAD's own file": (text("q.json", json.dumps({"version": "1.1", "data": SQUAD})),
                         "python* -c"),
    "an array in a jsonl": (text("q.jsonl", json.dumps([ROW])), "python* -c"),
    "an object over lines": (text("q.jsonl", json.dumps(ROW, indent=2)), "python* -c"),
    "parquet in a jsonl": (("q.jsonl", answer("Ada")[1]), "python* -c"),
    "jsonl.gz": (packed("q.jsonl.gz", json.dumps(ROW)), "gzip -dc"),
    "csv.gz": (packed("q.csv.gz", CSV), "gzip -dc"),
    "gz in a csv": (packed("q.csv", CSV), "gzip -dc"),
    "UTF-16 csv": (text("q.csv", CSV, "utf-16"), "iconv -f utf-16 "),
    "UTF-16 tsv of Excel": (text("q.tsv", CSV.replace(",", "\t"), "utf-16"), "iconv -f utf-16 "),
    "UTF-16 without a mark": (text("q.csv", CSV, "utf-16-le"), "iconv -f utf-16le"),
    "UTF-16 jsonl": (jsonl("q.jsonl", ROW, encoding="utf-16"), "iconv -f utf-16 "),
    "Windows-1252 csv": (text("q.csv", CSV + "qui,café\n", "cp1252"), "iconv -f windows-1252"),
    "Windows-1252 jsonl": (jsonl("q.jsonl", {**ROW, "answer": "café"}, encoding="cp1252"),
                           "iconv -f windows-1252"),
    "a packed parquet": (packed("q.parquet.gz", ""), "q.parquet"),
    "an archive": (packed("q.tar.gz", ""), "tar -xf"),
    "an Arrow stream of the hub's cache": (("q.arrow", stream), "python* -c"),
    "an answer that runs into empty columns": (text("q.csv", "question,answer,\nwho,Ada,L\n"),
                                               "put quotes around"),
    "a tsv whose quotes run on": (text("q.tsv", 'question\tanswer\n"a\tb\nc"\td\n'),
                                  "double the quotation marks"),
    "a table without a header": (text("q.tsv", "who\t['Ada']\nwhy\t['x']\n"), "in its first line"),
    "a spreadsheet": (text("q.xlsx", "PK\3\4"), "save it as csv"),
    "a pointer of git-lfs": (text("q.parquet", "version https://git-lfs.github.com\n"),
                             "git lfs pull"),
    "a page of a login": (text("q.jsonl", "<!DOCTYPE html>\n"), "give the file"),
    "problem and solution": (jsonl("q.jsonl", {"problem": "1+1", "solution": "2"}),
                             "rename the column problem to question"),
    "Problem and Answer": (text("q.csv", "Problem,Answer\nx,2\n"),
                           "rename the column Problem to question"),
    "question and solution": (jsonl("q.jsonl", {"question": "1+1", "solution": "so \\boxed{2}"}),
                              "final answer of each solution alone"),
    "Natural Questions' own file": (jsonl("q.jsonl", {"question_text": "who", "annotations": []}),
                                    "rename the column question_text"),
    "a parquet without question": (table({"query": "who", "answer": "a"}),
                                   "rename the column query"),
    "GSM8K": (jsonl("q.jsonl", {**ROW, "answer": "1+1=2\n#### 2"}), "what stands after ####"),
    "MATH": (jsonl("q.jsonl", {**ROW, "answer": "so $\\boxed{2}$"}), "what stands after ####"),
    "chat messages": (jsonl("q.jsonl", {"messages": [{"role": "user", "content": "who"}]}),
                      "the user's text as question"),
    "a test set without answers": (jsonl("q.jsonl", {"_id": "5a", "question": "who"}),
                                   "column of the answers"),
    "TriviaQA's test set": (jsonl("q.jsonl", {**ROW, "answer": {"value": "<unk>", "aliases": []}}),
                            "drop the row"),
    "an answer under an unknown key beside aliases": (jsonl("q.jsonl", {**ROW, "answer": {
        "title": "Ada", "aliases": ["L"]}}), "write each answer as text"),
    "a key twice": (text("q.jsonl", '{"question": "who", "answer": "Ada", "answer": "Bob"}\n'),
                    "correct line 1"),
    "a csv column twice": (text("q.csv", "question,answer,answer\nwho,Ada,Bob\n"), "drop one"),
    "pandas' second column": (text("q.csv", "question,answer,answer.1\nwho,Ada,Bob\n"), "drop one"),
    "a column in two spellings": (jsonl("q.jsonl", {**ROW, "Question": "whom"}), "drop"),
    "a parquet column twice": (("q.parquet", two_columns), "drop one"),
    "a question saved as a list": (jsonl("q.jsonl", {**ROW, "question": "['who']"}), "drop"),
    **{f"an answer that is {value!r}": (answer(value), "write each answer as text")
       for value in (decimal.Decimal("3.5"), datetime.date(2020, 1, 1),
                     pd.Timestamp("2020-01-01"), True, 3.5, b"Ada", [1, 2], [True],
                     [["Ada"]])},
    **{f"no answer but {value!r}": (answer(value), "drop the row")
       for value in (None, float("nan"), "nan", "None", "", [], [None])},
}  # fmt: skip


def read(form: Form, folder: Path) -> tuple[Path, list[Any]]:
    """Write a file and read it as the builder does."""
    path = folder / form[0]
    form[1](path)
    return path, list(read_files(OwnOptions(files=(path,))))


@pytest.mark.parametrize("name", READ)
def test_a_form_of_the_field_is_read(name: str, tmp_path: Path) -> None:
    """Question and all accepted answers, whatever the form."""
    form, answers = READ[name]
    _, (question,) = read(form, tmp_path)
    assert (question.text, question.answers) == ("who?", answers)


@pytest.mark.parametrize("name", REFUSED)
def test_another_form_is_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    """One short line that names the file and what to do; never a row with a wrong answer."""
    form, fix = REFUSED[name]
    try:
        path, found = read(form, tmp_path)
        bad = [row for row in found if isinstance(row, BadRow)]
        assert len(bad) == 1
        message = bad[0].problem
    except DataError as error:
        path, message = tmp_path / form[0], str(error)
    assert "\n" not in message and len(message) < 1000
    assert message.startswith(str(path)) and ", expected " in message
    first, _, second = fix.partition("*")
    assert first in message.partition("; fix: ")[2] and second in message


CONVERTED = ("an Arrow stream of the hub's cache", "jsonl.gz", "HotpotQA's own array",
             "TriviaQA's own file", "SQuAD's own file", "an object over lines", "UTF-16 csv",
             )  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_the_named_command_makes_a_file_that_is_read(name: str, tmp_path: Path) -> None:
    """Run as it is printed, also where the file already has the right suffix."""
    form, _ = REFUSED[name]
    path = tmp_path / form[0]
    form[1](path)
    before = path.read_bytes()
    with pytest.raises(DataError) as refusal:
        list(read_files(OwnOptions(files=(path,))))
    command = str(refusal.value).partition("fix: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    (made,) = set(tmp_path.iterdir()) - {path}
    (question,) = read_files(OwnOptions(files=(made,)))
    assert not isinstance(question, BadRow) and "Ada" in question.answers
    assert path.read_bytes() == before


PROMPT = [{"role": "user", "content": "Who?"}]
TRUTH = {"style": "rule", "ground_truth": {"target": ["Ada", "L"]}}
VERL = {"data_source": "nq", "prompt": PROMPT, "reward_model": TRUTH, "extra_info": {"index": 7}}
CELL_OF_PANDAS = str(
    {"ground_truth": {"target": np.array(["Ada", "L"], dtype=object)}, "style": "rule"}
)
ROWS_READ: dict[str, Form] = {
    "veRL's parquet": table(VERL),
    "reward_model as JSON text": table({**VERL, "reward_model": json.dumps(TRUTH)}),
    "reward_model as Python's text": jsonl("q.jsonl", {**VERL, "reward_model": str(TRUTH)}),
    "reward_model as pandas' csv has it": jsonl(
        "q.jsonl", {**VERL, "reward_model": CELL_OF_PANDAS}
    ),
    "extra_info as text": table({**VERL, "extra_info": '{"index": 7}'}),
    "prompt as JSON text": table({**VERL, "prompt": json.dumps(PROMPT)}),
    "prompt as NumPy's text": jsonl("q.jsonl", {**VERL, "prompt": str(np.array(PROMPT))}),
    "a category": ("q.parquet", lambda path: pd.DataFrame([VERL]).astype(
        {"data_source": "category"}).to_parquet(path)),
}  # fmt: skip
ROWS_REFUSED: dict[str, tuple[Form, str]] = {
    "questions without prompts": (READ["FlashRAG"][0], "own_questions.py"),
    "the same in parquet": (READ["Search-R1's parquet"][0], "own_questions.py"),
    "a csv": (text("q.csv", CSV), "own_questions.py"),
    "gz": (packed("q.jsonl.gz", json.dumps(VERL)), "gzip -dc"),
    "UTF-16": (jsonl("q.jsonl", VERL, encoding="utf-16"), "iconv"),
    "messages with their answer": (
        jsonl("q.jsonl", {"messages": [*PROMPT, {"role": "assistant", "content": "Ada"}]}),
        "messages before the answer into prompt"),
    "a prompt with its answer": (
        jsonl("q.jsonl", {**VERL, "prompt": [*PROMPT, {"role": "assistant", "content": "Ada"}]}),
        "drop the assistant's message"),
    "ShareGPT's turns": (jsonl("q.jsonl", {**VERL, "prompt": [{"from": "human", "value": "x"}]}),
                         "a role and a content"),
    "content in parts": (jsonl("q.jsonl", {**VERL, "prompt": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]}]}), "content that are text"),
    "columns in capitals": (jsonl("q.jsonl", {k.title(): v for k, v in VERL.items()}),
                            "rename 'Prompt' to prompt"),
    "a truth in capitals": (jsonl("q.jsonl", {**VERL, "reward_model": {
        "ground_truth": {"Target": ["Ada"]}}}), 'write ground_truth as {"target"'),
    **{f"a truth that is {value!r}": (jsonl("q.jsonl", {**VERL, "reward_model": {
        "ground_truth": value}}), "write ground_truth as")
       for value in (3, True, 3.5, None, float("nan"), [1], "nan", {})},
    "a truth beside reward_model": (jsonl("q.jsonl", {
        "data_source": "nq", "prompt": "Who?", "ground_truth": "Ada"}), "docs/guides/data.md"),
    "a key twice": (text("q.jsonl", json.dumps(VERL)[:-1] + ', "prompt": "x"}'), "correct line 1"),
    "half a character in a message saved as text": (
        jsonl("q.jsonl", {**VERL, "prompt": json.dumps([{"role": "user", "content": "\ud800"}])}),
        "content that are text"),
    "a list as the set's name": (jsonl("q.jsonl", {**VERL, "data_source": "['nq']"}), "drop"),
    "a text as the set's name": (jsonl("q.jsonl", {**VERL, "data_source": "n" * 1000}), "drop"),
    "text that is no object": (jsonl("q.jsonl", {**VERL, "extra_info": "x"}), "drop"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS_READ)
def test_a_row_file_of_the_field_is_read(name: str, tmp_path: Path) -> None:
    """Prompt, answers and further values are those that were saved, and nothing is kept twice."""
    file, write = ROWS_READ[name]
    write(tmp_path / file)
    (row,) = load_rows(str(tmp_path / file))
    assert (row.prompt, row.ground_truth, row.data_source) == (tuple(PROMPT), ("Ada", "L"), "nq")
    assert (row.extra_info, row.row_truth) == ({"index": 7}, None)


@pytest.mark.parametrize("name", ROWS_REFUSED)
def test_another_row_file_is_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    """By a run and by `validate`, in one short line."""
    (file, write), fix = ROWS_REFUSED[name]
    path = tmp_path / file
    write(path)
    with pytest.raises(DataError) as refusal:
        load_rows(str(path))
    message = str(refusal.value)
    assert fix in message.partition("; fix: ")[2]
    assert "\n" not in message and message.startswith(str(path)) and len(message) < 1000
    assert not validate([str(path)]).is_sound
