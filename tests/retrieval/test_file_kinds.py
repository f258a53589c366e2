"""A corpus in another form is named, with a command that makes jsonl of it."""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import CorpusError

ROWS = [
    {"id": "0", "title": "Österreich", "text": "Ein Land."},
    {"id": "1", "title": "B", "text": "b"},
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("corpus.jsonl", JSONL)


CONVERTED: dict[str, Callable[[Path], object]] = {
    "corpus.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "corpus.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(JSONL)),
    "corpus.jsonl.xz": lambda path: path.write_bytes(lzma.compress(JSONL)),
    "corpus.zip": zipped,
    "corpus.parquet": lambda path: pd.DataFrame(ROWS).to_parquet(path),
    "it's a corpus.tsv": lambda path: pd.DataFrame(ROWS).to_csv(path, sep="\t", index=False),
    "corpus.json": lambda path: path.write_text(json.dumps(ROWS)),
    "corpus.feather": lambda path: pd.DataFrame(ROWS).to_feather(path, compression="uncompressed"),
    "corpus.utf16": lambda path: path.write_bytes(JSONL.decode().encode("utf-16")),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_the_named_command_converts_the_corpus(name: str, tmp_path: Path) -> None:
    """Run as it is printed, it leaves a file that is served."""
    path = tmp_path / name
    CONVERTED[name](path)
    with pytest.raises(CorpusError) as caught:
        Corpus.open(path)
    command = str(caught.value).partition("fix: ")[2]
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    (made,) = tmp_path.glob("*.jsonl")
    assert [document.title for document in Corpus.open(made)] == ["Österreich", "B"]


def test_other_files_are_named(tmp_path: Path) -> None:
    """An index, a page of a login, a pointer in place of a file."""
    index = faiss.index_factory(8, "IVF2,Flat")
    index.train(np.random.default_rng(0).normal(size=(100, 8)).astype("float32"))
    faiss.write_index(index, str(tmp_path / "a FAISS index"))
    np.save(tmp_path / "a numpy array", np.zeros(3))
    (tmp_path / "an HTML page").write_text("<!DOCTYPE html><html>log in</html>")
    (tmp_path / "a pointer of git-lfs").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "an SQLite database").write_bytes(b"SQLite format 3\0" + bytes(80))
    for path in tmp_path.iterdir():
        with pytest.raises(CorpusError, match=path.name.removesuffix(".npy")):
            Corpus.open(path)


@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n", "  "])
def test_jsonl_is_not_taken_for_anything_else(start: str, tmp_path: Path) -> None:
    """A byte-order mark, blank lines and spaces may stand before the first row."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(start + JSONL.decode(), encoding="utf-8")
    assert len(Corpus.open(path)) == 2
