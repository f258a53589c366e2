"""Question files that cannot be used: each is told in one line, with its row where it has one."""

import datetime
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from jinja2 import TemplateError

from search_r1.inference.command import read_questions
from tests.fakes import ByteTokenizer
from verl.data import load_rows, render
from verl.data.rows import Row
from verl.data.validation import validate
from verl.errors import DataError
from verl.sft.demonstrations import load_demonstrations

GOOD: dict[str, Any] = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Who?"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}
LINE = json.dumps(GOOD).encode() + b"\n"


def row(**parts: object) -> bytes:
    return json.dumps({**GOOD, **parts}).encode()


def said(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def truth(target: object) -> dict[str, object]:
    return {"ground_truth": {"target": target}}


ROWS = {
    "half a character in a prompt": row(prompt="\ud800"),
    "in a message": row(prompt=said("\udfff")),
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
    "two in one line": LINE.strip() * 2,
    "text": b"hello",
    "single quotes": str(GOOD).encode(),
    **{f"a row that is {one}": one.encode() for one in ("[1]", '"x"', "null", "3", "true", "NaN")},
    "no prompt": b'{"data_source": "a"}',
    **{f"prompt {one!r}": row(prompt=one)
       for one in (3, None, [], "", ["x"], [said("x")], {"role": "user"}, [{"content": "x"}])},
    **{f"content {one!r}": row(prompt=said(one)) for one in (None, 3, [{"type": "text"}])},
    **{f"source {one!r}": row(data_source=one) for one in (None, 3, ["a"], "")},
    **{f"reward_model {one!r}": row(reward_model=one) for one in (None, "x", [1], {})},
    **{f"answer {one!r}": row(reward_model=truth(one))
       for one in (None, 3, [], "", [""], ["  "], [1, 2], [["a"]], {"a": 1}, ["a", 1])},
    **{f"extra_info {one!r}": row(extra_info=one) for one in ([1], "x", 3)},
}  # fmt: skip
"""The second line of a file whose first is good."""


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
    "json_text.parquet": table(reward_model=['{"ground_truth": "a"}']),
    "dates.parquet": table(data_source=[datetime.date(2020, 1, 1)]),
    "folder.jsonl": None,
    "folder.parquet": None,
}
"""Whole files; None is a folder."""


def refused(path: Path) -> str:
    """The one line that a run, a file of questions and the report of a file all say."""
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    with pytest.raises(DataError):
        read_questions(str(path))
    assert not validate([str(path)]).is_sound
    text = str(caught.value)
    assert path.name in text and ", expected " in text and "; fix: " in text and "\n" not in text
    return text


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_told_with_its_number(name: str, tmp_path: Path) -> None:
    """Whatever a line holds, the error names its row, and is text that can be written."""
    path = tmp_path / "q.jsonl"
    path.write_bytes(LINE + ROWS[name] + b"\n" + LINE)
    assert "row 1 (counted from 0)" in refused(path).encode().decode()


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_told(name: str, tmp_path: Path) -> None:
    """What is no file of questions is told before any row of it is used."""
    path, content = tmp_path / name, FILES[name]
    path.mkdir() if content is None else path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize(
    "path", ["", "no.jsonl", "a\0b.jsonl", "\ud800.jsonl", "x" * 5000 + ".jsonl"]
)
def test_a_path_that_cannot_be_is_no_file(path: str) -> None:
    """Whatever text stands for a file, it is told that there is none."""
    with pytest.raises(DataError, match="expected"):
        load_rows(path)
    with pytest.raises(DataError, match="expected"):
        read_questions(path)


def test_odd_files_that_are_sound_are_read(tmp_path: Path) -> None:
    """A mark of byte order, ends of lines of Windows and characters of two halves do no harm."""
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE.replace(b"\n", b"\r\n") + row(prompt="\U0001f600"))
    assert load_rows(str(path))[1].prompt == "\U0001f600"


class Strict(ByteTokenizer):
    """A tokenizer whose chat template takes nothing."""

    chat_template = "a template"

    def apply_chat_template(self, conversation: object, **_: object) -> str:
        raise TemplateError("roles must alternate")


def test_a_prompt_that_the_template_refuses_is_told_with_its_row() -> None:
    """A chat template may raise over roles that a row mixes; that is the row's fault."""
    bad = Row("q.jsonl", 7, ({"role": "wizard", "content": "x"},), "nq", ("a",))
    with pytest.raises(DataError, match=r"q\.jsonl#7: got \['wizard'\] \(roles must alternate\)"):
        render(bad, Strict())


def test_a_demonstration_that_cannot_be_is_told(tmp_path: Path) -> None:
    """Supervised training reads its lines by the same reader, which tells the row."""
    path, tokenizer = tmp_path / "d.jsonl", ByteTokenizer()
    for line in (
        *ROWS.values(),
        b'{"prompt": [{}], "segments": []}',
        b'{"prompt": "x"}',
        b'{"prompt": "x", "segments": [{"origin": "policy", "text": null}]}',
    ):
        path.write_bytes(line + b"\n")
        with pytest.raises(DataError, match="row 0"):
            load_demonstrations(str(path), tokenizer, 100)
