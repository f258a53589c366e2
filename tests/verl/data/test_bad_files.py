"""Unusable question files give a one-line error, with the row number if a row is at fault."""

import datetime
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jinja2 import TemplateError

from search_r1.inference.batch import read_questions
from tests.fakes import ByteTokenizer
from verl.data.prompts import render
from verl.data.rows import Row, load_rows
from verl.data.validation import validate
from verl.errors import DataError

GOOD: dict[str, Any] = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Who?"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}
LINE = json.dumps(GOOD).encode() + b"\n"


def row(**parts: object) -> bytes:
    return json.dumps({**GOOD, **parts}).encode()


def user_message(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def truth(target: object) -> dict[str, object]:
    return {"ground_truth": {"target": target}}


ROWS = {
    "half a character in a prompt": row(prompt="\ud800"),
    "in a message": row(prompt=user_message("\udfff")),
    "in a role": row(prompt=[{"role": "\ud800", "content": "x"}]),
    "in a source": row(data_source="\ud800"),
    "in an answer": row(reward_model=truth(["\ud800"])),
    "in extra_info": row(extra_info={"question": "\ud800"}),
    "in a key": row(extra_info={"\ud800": 1}),
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "deep below a row": LINE[:-2] + b', "extra_info": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "NUL": b"\0",
    "many NUL": b"\0" * 10_000,
    "not UTF-8": LINE.strip().replace(b"Who", b"Qu\xe9"),
    "a long number": b"9" * 5000,
    "a long number below": row(extra_info={"n": 0}).replace(b'"n": 0', b'"n": ' + b"9" * 5000),
    "cut": LINE[:-10],
    "two in value line": LINE.strip() * 2,
    "text": b"hello",
    "single quotes": str(GOOD).encode(),
    **{f"a row that is {value}": value.encode()
       for value in ("[1]", '"x"', "null", "3", "true", "NaN")},
    "no prompt": b'{"data_source": "a"}',
    **{f"prompt {value!r}": row(prompt=value)
       for value in (3, None, [], "", ["x"], [user_message("x")], {"role": "user"},
                     [{"content": "x"}])},
    **{f"content {value!r}": row(prompt=user_message(value))
       for value in (None, 3, [{"type": "text"}])},
    **{f"source {value!r}": row(data_source=value) for value in (None, 3, ["a"], "")},
    **{f"reward_model {value!r}": row(reward_model=value) for value in (None, "x", [1], {})},
    **{f"answer {value!r}": row(reward_model=truth(value))
       for value in (None, 3, [], "", [""], ["  "], [1, 2], [["a"]], {"a": 1}, ["a", 1])},
    **{f"extra_info {value!r}": row(extra_info=value) for value in ([1], "x", 3)},
}  # fmt: skip
"""Bad second lines of a file whose first line is good."""


def table(**columns: object) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table({**{k: [v] for k, v in GOOD.items()}, **columns}), file
    )
    return file.getvalue()


WHOLE = table()
OFFSETS, HALVES = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")
NOT_TEXT = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, OFFSETS, HALVES])
NOTHING = pyarrow.array([], type=pyarrow.string())
FILES = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n \n",
    "utf16.jsonl": LINE.decode().encode("utf-16"),
    "utf32.jsonl": LINE.decode().encode("utf-32"),
    "gzip.jsonl": b"\x1f\x8b\x08" + bytes(50),
    "one.json": b"[]",
    "one.csv": b"question,answer\n",
    "empty.parquet": b"",
    "lines.parquet": LINE,
    "zeros.parquet": bytes(1000),
    "half.parquet": WHOLE[: len(WHOLE) // 2],
    "no_end.parquet": WHOLE[:-8],
    "marks.parquet": b"PAR1PAR1",
    "long_end.parquet": WHOLE[:-8] + b"\xff\xff\xff\x7fPAR1",
    "no_rows.parquet": table(data_source=NOTHING, prompt=NOTHING, reward_model=NOTHING),
    "numbers.parquet": table(prompt=[3]),
    "bytes.parquet": table(prompt=[b"\xff"]),
    "not_text.parquet": table(prompt=NOT_TEXT),
    "no_source.parquet": table(data_source=NOT_TEXT),
    "nulls.parquet": table(data_source=[None], prompt=[None], reward_model=[None]),
    "damaged_text.parquet": table(reward_model=['{"ground_truth": "a"']),
    "dates.parquet": table(data_source=[datetime.date(2020, 1, 1)]),
    "folder.jsonl": None,
    "folder.parquet": None,
}
"""Contents of bad files; None stands for a folder."""


def refusal(path: Path) -> str:
    """Return the one-line error of a run; `infer` and `validate` must refuse the file as well."""
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    with pytest.raises(DataError):
        read_questions(str(path))
    assert not validate([str(path)]).is_sound
    text = str(caught.value)
    assert path.name in text and ", expected " in text and "; fix: " in text and "\n" not in text
    return text


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_refused_with_its_number(name: str, tmp_path: Path) -> None:
    """For any content, the error names the row and can be encoded in UTF-8."""
    path = tmp_path / "q.jsonl"
    path.write_bytes(LINE + ROWS[name] + b"\n" + LINE)
    assert "row 1 (counted from 0)" in refusal(path).encode().decode()


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    """Files that do not contain questions are refused."""
    path, content = tmp_path / name, FILES[name]
    path.mkdir() if content is None else path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize(
    "path", ["", "no.jsonl", "a\0b.jsonl", "\ud800.jsonl", "x" * 5000 + ".jsonl"]
)
def test_an_impossible_path_is_refused(path: str) -> None:
    """Any text may be given as a path; the error is the usual one."""
    with pytest.raises(DataError, match="expected"):
        load_rows(path)
    with pytest.raises(DataError, match="expected"):
        read_questions(path)


def test_unusual_but_valid_files_are_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends and surrogate pairs in JSON are accepted."""
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE.replace(b"\n", b"\r\n") + row(prompt="\U0001f600"))
    assert load_rows(str(path))[1].prompt == "\U0001f600"


class RejectingTokenizer(ByteTokenizer):
    """A tokenizer whose chat template rejects every conversation."""

    chat_template = "a template"

    def apply_chat_template(self, conversation: object, **_: object) -> str:
        raise TemplateError("roles must alternate")


def test_a_prompt_rejected_by_the_template_names_its_row() -> None:
    """A chat template may raise for the roles of a row; the error is about the row."""
    bad = Row("q.jsonl", 7, ({"role": "wizard", "content": "x"},), "nq", ("a",))
    with pytest.raises(DataError, match=r"q\.jsonl#7"):
        render(bad, RejectingTokenizer())
