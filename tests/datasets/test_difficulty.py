"""`search-r1 data difficulty`: pass rates of finished evaluations as columns."""

from pathlib import Path

import pyarrow.parquet
import pytest

from search_r1.datasets.command import build
from search_r1.evaluation.samples import FAILED
from search_r1.evaluation.store import Store
from tests.datasets.collection import write_jsonl
from tests.evaluation.scripted import sample
from tests.evaluation.test_tables import MANIFEST

QUESTIONS = ["Who is first?", "Who is second?"]


def evaluation(folder: Path, ems: list[list[float | None]]) -> Path:
    """Write a finished evaluation with several samples of each question; None is a failure."""
    n = len(ems[0])
    manifest = MANIFEST | {
        "data": {**MANIFEST["data"], "num_rows": len(ems)},
        "decoding": {**MANIFEST["decoding"], "n": n, "temperature": 1.0},
    }
    with Store(folder, manifest) as store:
        for row, scores in enumerate(ems):
            for number, em in enumerate(scores):
                question = QUESTIONS[row]
                status = FAILED if em is None else "answered"
                store.append(sample(f"f#{row}", em or 0.0, number=number, question=question,
                                    status=status))  # fmt: skip
    return folder


def rows(tmp_path: Path, questions: list[str]) -> str:
    """Write a question file."""
    raw = [{"question": q, "golden_answers": ["gold"], "data_source": "nq"} for q in questions]
    file = write_jsonl(tmp_path / "raw.jsonl", list(raw))
    arguments = [str(file), "--local_dir", str(tmp_path), "--test_share", "0"]
    assert build("own_questions", arguments) == 0
    return str(tmp_path / "train.parquet")


def test_pass_rates_are_shares_of_all_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The samples of two evaluations are pooled, but for failed ones; other columns stay."""
    one = evaluation(tmp_path / "one", [[1, 0, 0, 0], [0, 0, 0, 0]])
    two = evaluation(tmp_path / "two", [[1, 1, None], [None, 0, 0]])
    file, out = rows(tmp_path, QUESTIONS), tmp_path / "rated"
    arguments = ["--evaluations", str(one), str(two), "--local_dir", str(out)]
    assert build("difficulty", [file, *arguments]) == 0
    table = pyarrow.parquet.read_table(out / "train.parquet")
    by_question = dict(
        zip(table["question"].to_pylist(), table["pass_rate"].to_pylist(), strict=True)
    )
    assert by_question == {QUESTIONS[0]: 0.5, QUESTIONS[1]: 0.0}
    assert table["num_samples"].to_pylist() == [6, 6]
    assert table.drop_columns(["pass_rate", "num_samples"]).equals(pyarrow.parquet.read_table(file))
    assert "| nq | 2 | 25.0 | 1 | 1 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize("question", ["Who is third?", QUESTIONS[0]], ids=["unknown", "no option"])
def test_a_question_without_samples_is_refused(
    tmp_path: Path, question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that was not evaluated has no rate, and no evaluation has none at all."""
    one = evaluation(tmp_path / "one", [[1, 0], [0, 0]])
    more = [] if question == QUESTIONS[0] else ["--evaluations", str(one)]
    file = rows(tmp_path, [question])
    assert build("difficulty", [file, *more, "--local_dir", str(tmp_path / "rated")]) == 2
    assert "--evaluations" in capsys.readouterr().err
