"""Recall by set: what counts as found, and which questions count."""

import json
from pathlib import Path

from benchmarks.retrieval.fusion import flags_of, read_questions, recalls
from benchmarks.retrieval.load import LoadReport

ROWS = [
    {"question": "a?", "golden_answers": ["Yes"], "data_source": "nq", "split": "train"},
    {"question": "b?", "golden_answers": ["no", "Nope"], "data_source": "nq", "split": "train"},
    {"question": "c?", "golden_answers": ["The Ilm"], "data_source": "nq", "split": "dev"},
    {"question": "d?", "golden_answers": ["Ilm"], "data_source": "x", "split": "dev"},
]


def test_shares_by_split_and_set(tmp_path: Path) -> None:
    """Whole words count, yes/no questions do not, and an error finds nothing."""
    for split in ("train", "dev"):
        rows = [row for row in ROWS if row["split"] == split]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(tmp_path)
    assert [row["question"] for row in questions] == ["b?", "c?", "d?"]
    found = [[[{"document": {"contents": text}}]] for text in ("nothing", "by the ilm.")]
    report = LoadReport(3, 1, 1.0, 1.0, [], [*found, None])
    shares = {("train", "nq"): 0, ("both", "nq"): 0.5, ("dev", "nq"): 1, ("both", "x"): 0,
              ("dev", "x"): 0}  # fmt: skip
    assert recalls(questions, report) == shares


def test_flags_of_an_engine() -> None:
    flags = flags_of("bm25+e5 model 0.8 0.2 --fusion ranks", Path("d"), Path("i"))
    assert flags[:2] == ["--retriever_name", "bm25+e5"] and flags[6:] == [
        "--fusion", "ranks", "--retriever_model", "model", "--fusion_weights", "0.8", "0.2"
    ]  # fmt: skip
