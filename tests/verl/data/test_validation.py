"""`python -m verl.data validate` lists all problems, and its status predicts a run's behaviour."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.bad_models import BAD, whole_model
from verl.config import Config
from verl.data.prompts import load_prompts
from verl.data.validation import lines, main, to_json, validate
from verl.errors import DataError


class ByteTokenizer:
    """Token ids are bytes; no chat template, no special tokens."""

    chat_template = None

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        raise AssertionError("there is no template")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def record(prompt: Any, target: Any = "Ada", source: Any = "nq") -> dict[str, Any]:
    """Return a row, which is valid unless a part is replaced."""
    truth = {"style": "rule", "ground_truth": {"target": target}}
    return {"data_source": source, "prompt": prompt, "reward_model": truth}


def jsonl(path: Path, rows: Sequence[Any]) -> str:
    """Write one row per line; a string is written unchanged."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n")
    return str(path)


def test_every_bad_row_is_named(tmp_path: Path) -> None:
    """All kinds of bad rows in all files are reported with numbers; valid rows are counted."""
    rows = [record("a"), "{torn", record("b", target=[]), record("c"), record([]), "[1]"]
    first = jsonl(tmp_path / "first.jsonl", rows)
    table = pyarrow.Table.from_pylist([record("d"), record("e", source="")])
    pyarrow.parquet.write_table(table, tmp_path / "second.parquet")
    second = str(tmp_path / "second.parquet")
    report = validate([first, second, str(tmp_path / "none.jsonl")])
    numbers = [[row.number for row in file.bad_rows] for file in report.files]
    assert numbers == [[1, 2, 4, 5], [1], []]
    assert [file.num_rows for file in report.files] == [6, 2, 0]
    assert [file.data_sources for file in report.files] == [{"nq": 2}, {"nq": 1}, {}]
    assert "no such file" in str(report.files[2].problem)
    assert not report.is_sound and report.num_bad == 5
    text = "\n".join(lines(report))
    for file, file_numbers in zip((first, second), numbers[:2], strict=True):
        assert all(f"{file}, row {number} (counted from 0)" in text for number in file_numbers)


def test_lengths_agree_with_what_a_run_filters(tmp_path: Path) -> None:
    """The counts over each budget equal what a run leaves out; statistics are computed by hand."""
    path = jsonl(tmp_path / "t.jsonl", [record("q" * n) for n in (5, 50, 9, 60, 10)])
    tokenizer = ByteTokenizer()
    lengths = validate([path], tokenizer, [9, 10, 59, 60]).lengths
    assert lengths is not None and lengths.unit == "tokens"
    assert (lengths.smallest, lengths.largest, lengths.mean) == (5, 60, 26.8)
    assert lengths.percentiles == {50: 10, 95: 60, 99: 60}
    config = Config()
    for budget, count in lengths.over.items():
        config.data.max_start_length = budget
        assert 5 - len(load_prompts(config, path, None, tokenizer)) == count


def test_the_shown_prompt_is_what_the_model_reads(tmp_path: Path) -> None:
    """The first valid row is decoded from its ids; without a tokenizer it is shown as messages."""
    message = [{"role": "user", "content": "Who was Ada?"}]
    path = jsonl(tmp_path / "t.jsonl", ["{", record(message)])
    assert validate([path], ByteTokenizer()).sample == "Who was Ada?"
    bare = validate([path])
    assert (bare.sample, bare.sample_uid) == ("[user]\nWho was Ada?", f"{path}#1")
    assert bare.lengths is not None and (bare.lengths.unit, bare.lengths.over) == ("characters", {})


def test_duplicate_prompts_are_reported(tmp_path: Path) -> None:
    """For example a training question in the validation file; it is not an error."""
    (tmp_path / "a").mkdir()
    train = jsonl(tmp_path / "a" / "t.jsonl", [record("x"), record("y"), record("x")])
    test = jsonl(tmp_path / "t.jsonl", [record("z"), record("y")])
    report = validate([train, test])
    assert [prompt.uids for prompt in report.repeated] == [
        (f"{train}#0", f"{train}#2"), (f"{train}#1", f"{test}#1"),
    ]  # fmt: skip
    assert report.is_sound


@pytest.mark.parametrize("last", [record("b"), record("b", target=[3])])
def test_status_agrees_with_a_run(
    tmp_path: Path, last: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 exactly if a run can load the rows; `--json` agrees."""
    path = jsonl(tmp_path / "t.jsonl", [record("a"), last])
    status = main(["validate", path, "--json"])
    printed = json.loads(capsys.readouterr().out)
    try:
        load_prompts(Config(), path, None, ByteTokenizer())
    except DataError as error:
        assert status == 1 and not printed["is_sound"]
        problem = printed["files"][0]["bad_rows"][0]["problem"]
        assert str(error) == f"{problem} (all of them: python -m verl.data validate {path})"
    else:
        assert status == 0 and printed["is_sound"]
    assert printed == json.loads(json.dumps(to_json(validate([path]))))


def test_unknown_tokenizer_and_budgets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without a model, and a budget of 0, end with status 2 and a message."""
    path = jsonl(tmp_path / "t.jsonl", [record("a")])
    assert main(["validate", path, "--model", str(tmp_path)]) == 2
    assert "(tokenizer: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["validate", path, "--budgets", "0"])


@pytest.mark.parametrize(
    "case", [case for case in BAD if case.startswith(("tokenizer", "template"))]
)
def test_a_model_s_bad_text_parts_are_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenizers and chat templates that cannot render a prompt (`tests/bad_models.py`)."""
    BAD[case][0](whole_model(tmp_path / "model"))
    assert main(["validate", "none.jsonl", "--model", str(tmp_path / "model")]) in (1, 2)
    printed = capsys.readouterr()
    if "ids up to" not in BAD[case][1]:  # too many for the embedding, which is not read here
        assert "validate: --model: got " in printed.err.splitlines()[-1]


def test_messages_that_the_template_rejects_are_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a run; other rows are still checked."""
    model = whole_model(tmp_path / "model")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refuses + "{{ messages[0].content }}")
    rows = [record([{"role": role, "content": "Who?"}]) for role in ("user", "system", "user")]
    path = jsonl(tmp_path / "t.jsonl", rows)
    assert main(["validate", path, "--model", str(model), "--json"]) == 1
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert (file["num_rows"], [row["number"] for row in file["bad_rows"]]) == (3, [1])
    assert "no system" in file["bad_rows"][0]["problem"]


def test_an_unreadable_file_does_not_hide_others(tmp_path: Path) -> None:
    """A read error is reported for its file."""
    broken = tmp_path / "broken.jsonl"
    broken.symlink_to("/proc/self/mem")  # reading its first page fails
    report = validate([str(broken), jsonl(tmp_path / "t.jsonl", [record("a")])])
    assert "Input/output error" in str(report.files[0].problem)
    assert report.files[1].num_rows == 1 and not report.is_sound
