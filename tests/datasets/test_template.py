"""`search-r1 data template`: the wording of a file's prompts as a template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.tags import R1_SEARCHER, SEARCH_R1, named_format
from search_r1.datasets.command import build
from tests.datasets.collection import write_jsonl
from verl.agent.tags import TagFormat
from verl.data.rows import load_rows

WORDINGS = {
    "search_r1": "Reply. “Look” up with <search> it </search>:\n\n  {question}\nDone: yes",
    "r1_searcher": "{question} <|begin_of_query|> a <|end_of_query|>",
}
QUESTIONS = ("who is first", "Who is: second? ", "search")


def row(instruction: str, text: str, **others: Any) -> dict[str, Any]:
    """Return a row as published builders write it: the prompt has a question mark, always."""
    asked = text.strip() if text.strip().endswith("?") else f"{text}?"
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": instruction.replace("{question}", asked)}],
        "reward_model": {"ground_truth": {"target": ["gold"]}},
        "question": text,
        **others,
    }


def run(tmp_path: Path, *rows: Mapping[str, Any], out: str = "mine.yaml") -> tuple[int, Path]:
    file = write_jsonl(tmp_path / "train.jsonl", list(rows))
    return build("template", ["--from", str(file), "--out", str(tmp_path / out)]), tmp_path / out


@pytest.mark.parametrize("known", [SEARCH_R1, R1_SEARCHER], ids=lambda known: known.name)
def test_the_template_writes_the_prompts_that_it_was_read_from(
    tmp_path: Path, known: TagFormat
) -> None:
    """Byte for byte, also by a builder of data; tags and feedback are the known format's."""
    wording = WORDINGS[known.name]
    status, out = run(tmp_path, *(row(wording, question) for question in QUESTIONS))
    template = named_format(str(out))
    assert (status, template.name, template.instruction) == (0, "mine", wording)
    assert (template.tags, template.invalid_action) == (known.tags, known.invalid_action)
    questions = [{"question": question, "answer": "gold"} for question in QUESTIONS]
    words = [str(write_jsonl(tmp_path / "own.jsonl", questions)), "--split", "train"]
    words += ["--local_dir", str(tmp_path), "--template_type", str(out)]
    assert build("own_questions", words) == 0
    built = load_rows(str(tmp_path / "train.parquet"))
    assert [r.prompt for r in built] == [r.prompt for r in load_rows(str(tmp_path / "train.jsonl"))]


ASKING = WORDINGS["search_r1"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(ASKING, "a"), row(f"{ASKING}!", "b")], "row 1"),
        ([row("Say: {question}", "a")], "explains <search>"),
        ([row(ASKING, "a", question="b")], "'b' in it"),
        ([row(ASKING, "a", question=None)], "a column question"),
        ([row(ASKING, "a", prompt="text")], "one message of the user"),
        ([row(ASKING, "a", prompt=[{"role": "system", "content": "a"}])], "roles system"),
    ],
)
def test_files_without_one_wording_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], expected: str
) -> None:
    """The row is named, and nothing is written."""
    status, out = run(tmp_path, *rows)
    assert (status, out.exists()) == (2, False)
    assert expected in capsys.readouterr().err


def test_the_options_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template that no option would read is not written."""
    assert build("template", []) == 2
    assert run(tmp_path, row(ASKING, "a"), out="template.txt")[0] == 2
    err = capsys.readouterr().err
    assert "--from" in err and ".yaml" in err
