"""The recipes with the names of the original's scripts: arguments, rows, merges and errors."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from search_r1.agent.tags import TEMPLATES
from search_r1.datasets.command import RECIPES
from search_r1.datasets.command import build as build_named
from search_r1.options import parse
from tests.datasets.collection import SPLITS, records, write_collection, write_jsonl
from verl.data.rows import load_rows
from verl.data.validation import validate

COMMON = {"local_dir": None, "hdfs_dir": None, "template_type": "base"}
RAG = {
    "topk": 3,
    "corpus_path": None,
    "train_retrieval_cache": None,
    "test_retrieval_cache": None,
}
ORIGINAL: dict[str, dict[str, Any]] = {
    "nq": {**COMMON, "local_dir": "data/nq"},
    "nq_rag": {**COMMON, **RAG, "local_dir": "data/nq_rag"},
    "nq_search": {**COMMON, "local_dir": "data/nq_search"},
    "qa_search_train_merge": {**COMMON, "local_dir": "data/nq_search", "data_sources": "nq"},
    "qa_search_test_merge": {**COMMON, "local_dir": "data/nq_search", "data_sources": "nq"},
}
"""The original's scripts with their arguments and defaults (None instead of its author's paths)."""
ALL = ",".join(SPLITS)


def build(name: str, source: Path, out: Path, *arguments: str) -> int:
    """Run a recipe on a local collection."""
    paths = ["--local_dataset_path", str(source), "--local_dir", str(out)]
    return build_named(name, [*paths, *arguments])


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet file."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the seven sets to disk."""
    return write_collection(tmp_path_factory.mktemp("flashrag"))


@pytest.mark.parametrize("name", ORIGINAL)
def test_original_arguments_and_defaults(name: str) -> None:
    """Every script of the original has a recipe with the same arguments and defaults."""
    options = vars(parse(RECIPES[name][0], [], prog=name, description=None))
    defaults = {key: options[key] for key in ORIGINAL[name]}
    as_text = {k: str(v) if isinstance(v, Path) else v for k, v in defaults.items()}
    assert as_text == ORIGINAL[name]


def test_row_of_natural_questions(collection: Path, tmp_path: Path) -> None:
    """A complete row: the fields and values of the original, and our additional ones."""
    assert build("nq_search", collection, tmp_path) == 0
    row = read(tmp_path / "test.parquet")[0]
    assert row == {
        "id": "nq_test_0",
        "question": "what is nq test 0?",
        "golden_answers": ["nq 0", "other"],
        "data_source": "nq",
        "prompt": [
            {
                "role": "user",
                "content": TEMPLATES["search_r1"].user_prompt("what is nq test 0?"),
            }
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["nq 0", "other"]}},
        "extra_info": {
            "split": "test",
            "index": 0,
            "id": "nq_test_0",
            "question": "what is nq test 0?",
            "source_split": "test",
        },
    }
    assert {file.name for file in tmp_path.iterdir()} == {"train.parquet", "test.parquet"}
    assert [r["extra_info"]["index"] for r in read(tmp_path / "train.parquet")] == [0, 1, 2]


def test_merge_of_all_test_sets(collection: Path, tmp_path: Path) -> None:
    """Seven sets in the given order, each from its test split or else dev, with unique ids."""
    assert build("qa_search_test_merge", collection, tmp_path, "--data_sources", ALL) == 0
    rows = read(tmp_path / "test.parquet")
    assert {file.name for file in tmp_path.iterdir()} == {"test.parquet"}
    assert [row["data_source"] for row in rows] == [name for name in SPLITS for _ in range(3)]
    for row in rows:
        splits = SPLITS[row["data_source"]]
        source = "test" if "test" in splits else "dev"
        assert (row["extra_info"]["split"], row["extra_info"]["source_split"]) == ("test", source)
        assert f" {source} " in row["question"] and row["question"].endswith(row["id"][-1] + "?")
    assert len({row["id"] for row in rows}) == len(rows) == 21
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2] * 7
    assert len({row.uid for row in load_rows(str(tmp_path / "test.parquet"))}) == 21


def test_merge_of_training_sets(collection: Path, tmp_path: Path) -> None:
    """The training mixture of the paper: the training splits of NQ, then of HotpotQA."""
    assert (
        build("qa_search_train_merge", collection, tmp_path, "--data_sources", "nq,hotpotqa") == 0
    )
    rows = read(tmp_path / "train.parquet")
    assert [row["id"] for row in rows] == [
        f"{name}_train_{number}" for name in ("nq", "hotpotqa") for number in range(3)
    ]
    assert validate([str(tmp_path / "train.parquet")]).is_sound


@pytest.mark.parametrize(
    ("name", "sources", "message"),
    [
        ("qa_search_train_merge", "nq,popqa", "got popqa, which has test only"),
        ("qa_search_train_merge", "nq,hotpot", "got 'hotpot', expected names among nq, triviaqa"),
        ("qa_search_test_merge", "nq,nq", "got nq 2 times"),
    ],
)
def test_wrong_sets_are_refused(
    collection: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    sources: str,
    message: str,
) -> None:
    """A set without the split, an unknown set and a repeated set are errors with a fix."""
    assert build(name, collection, tmp_path, "--data_sources", sources) == 2
    error = capsys.readouterr().err
    assert message in error and "fix:" in error
    assert not list(tmp_path.iterdir())


def test_same_questions_give_the_same_bytes(collection: Path, tmp_path: Path) -> None:
    """Two builds give equal bytes, also if one reads parquet and the other jsonl."""
    source = tmp_path / "parquet" / "nq"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist(records("nq", split))
        pyarrow.parquet.write_table(table, source / f"{split}.parquet")
    folders = {"a": collection, "b": collection, "c": source.parent, "d": source}
    for out, folder in folders.items():
        assert build("nq_search", folder, tmp_path / out) == 0
    for file in ("train.parquet", "test.parquet"):
        assert len({(tmp_path / out / file).read_bytes() for out in folders}) == 1


def test_bad_rows_are_listed_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists each bad row with file and number; --drop_bad_rows skips them."""
    good, source = records("nq", "train"), tmp_path / "source"
    bad = [
        {**good[0], "question": "  "},
        "{torn",
        {**good[1], "golden_answers": []},
        {**good[1], "golden_answers": ["", " "]},
        {**good[1], "golden_answers": [7]},
        {"id": "x", "question": "q"},
        good[0],
        "[]",
    ]
    file = write_jsonl(source / "nq" / "train.jsonl", [*good, *bad])
    write_jsonl(source / "nq" / "test.jsonl", records("nq", "test"))
    out = tmp_path / "out"
    assert build("nq_search", source, out) == 2
    error = capsys.readouterr().err
    assert "8 bad rows" in error
    for number, part in zip(
        range(3, 11),
        (", question: got '  '", ": got Expecting", ", golden_answers: got []",
         ", golden_answers: got ['', ' ']", ", golden_answers: got [7]",
         ": got columns id, question", f", id: got 'nq_train_0' as in {file}, row 0",
         ": got []"),
        strict=True,
    ):  # fmt: skip
        assert f"{file}, row {number} (counted from 0){part}" in error
    assert not out.exists()
    assert build("nq_search", source, out, "--drop_bad_rows") == 0
    assert len(read(out / "train.parquet")) == 3


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error for a missing set has the expected path and the command to download it."""
    assert build("nq_search", tmp_path, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert f"expected {tmp_path}/nq/train.jsonl (or .parquet)" in error
    assert "hf download --repo-type dataset RUC-NLPIR/FlashRAG_datasets" in error


@pytest.mark.parametrize("template", ["base", *TEMPLATES])
def test_each_template_words_the_prompt(collection: Path, tmp_path: Path, template: str) -> None:
    """`--template_type` selects the wording; `base` is the paper's."""
    assert build("nq_search", collection, tmp_path, "--template_type", template) == 0
    row = read(tmp_path / "train.parquet")[2]
    wording = TEMPLATES["search_r1" if template == "base" else template]
    assert row["prompt"][0]["content"] == wording.user_prompt("what is nq train 2?")


@pytest.mark.parametrize(("name", "template"), [("nq_search", "none"), ("nq", "short")])
def test_unknown_template_is_refused(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, template: str
) -> None:
    """The error for an unknown template lists the valid ones."""
    assert build(name, collection, tmp_path, "--template_type", template) == 2
    assert f"--template_type: got {template}, expected one of base" in capsys.readouterr().err


def test_direct_prompts_ask_for_no_search(collection: Path, tmp_path: Path) -> None:
    """The prompt of the baseline without search has the same think and answer tags."""
    assert build("nq", collection, tmp_path) == 0
    content = read(tmp_path / "test.parquet")[0]["prompt"][0]["content"]
    assert "<search>" not in content and "<information>" not in content
    assert "<think>" in content and "</answer>" in content
    assert content.endswith("Question: what is nq test 0?\n")


def test_files_are_copied(collection: Path, tmp_path: Path) -> None:
    """`--hdfs_dir` receives a copy of the files, here on the local file system."""
    target = tmp_path / "far" / "away"
    assert build("nq", collection, tmp_path / "near", "--hdfs_dir", str(target)) == 0
    for file in ("train.parquet", "test.parquet"):
        assert (target / file).read_bytes() == (tmp_path / "near" / file).read_bytes()
