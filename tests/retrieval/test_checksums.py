"""Checksums: every flipped bit is found, samples vary, indexes without checksums are served."""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.retrieval import checksums
from search_r1.retrieval.checksums import check, sample_indices
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import IndexMismatch, SearchError
from search_r1.retrieval.index_builder import main
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.conftest import write_corpus


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a BM25 and a dense index."""
    folder = tmp_path_factory.mktemp("built")
    corpus = str(write_corpus(folder / "corpus.jsonl"))
    for method in ("bm25", "hash"):
        flags = ["--retrieval_method", method, "--model_path", "hash", "--corpus_path", corpus]
        assert main([*flags, "--save_dir", str(folder)]) == 0
    return folder


TARGETS = ("bm25", "hash_Flat.index", "corpus.jsonl")
FILES = [
    *((name, f"{name}/{inside}") for name, inside in [
        ("bm25", "data.csc.index.npy"), ("bm25", "indices.csc.index.npy"),
        ("bm25", "indptr.csc.index.npy"), ("bm25", "vocab.index.json"),
        ("bm25", "params.index.json"), ("bm25", "manifest.json"), ("bm25", "checksums.json"),
        ("hash_Flat.index", "vectors.faiss"), ("hash_Flat.index", "manifest.json"),
        ("hash_Flat.index", "checksums.json"),
    ]),
    *(("corpus.jsonl", f"corpus.jsonl{end}") for end in ("", ".offsets.npy", ".checksums.json")),
]  # fmt: skip


def test_all_files_are_listed(built: Path) -> None:
    """The table above lists all files of a corpus and its indexes."""
    files = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    assert files == {name for _, name in FILES}


@given(st.sampled_from(FILES), st.integers(0), st.integers(0, 7))
@settings(max_examples=150)
def test_any_flipped_bit_is_found(built: Path, file: tuple[str, str], place: int, bit: int) -> None:
    """A single flipped bit in any file is found by the complete comparison."""
    target, path = built / file[0], built / file[1]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= 1 << bit
    try:
        path.write_bytes(damaged)
        with pytest.raises(IndexMismatch, match="expected the file that the checksums"):
            check(target, whole=True)
    finally:
        path.write_bytes(whole)
    assert check(target, whole=True) is not None


def test_every_bit_of_the_checksums_counts(built: Path) -> None:
    """A flipped bit in the checksums themselves is found; every 29th is tested."""
    path = built / "bm25" / "checksums.json"
    whole = path.read_bytes()
    for place in range(0, 8 * len(whole), 29):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(IndexMismatch):
            check(built / "bm25", whole=True)
    path.write_bytes(whole)


def test_a_start_compares_ends_and_random_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage at an end is always found, elsewhere in some starts, and always with `whole`."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 8)
    for name in "ab":
        (tmp_path / name).write_bytes(random.Random(0).randbytes(8 * 400 + 3))
    checksums.add(tmp_path)
    for place in (0, 8 * 400 + 2):
        flip(tmp_path / "b", place)
        with pytest.raises(IndexMismatch, match=r"other content in the 8 bytes from byte"):
            check(tmp_path)
        flip(tmp_path / "b", place)
    flip(tmp_path / "b", 1000)
    num_found = 0
    for _ in range(200):
        try:
            check(tmp_path)
        except IndexMismatch:
            num_found += 1
    assert 2 <= num_found < 60  # 62 of 800 blocks: 15 expected
    with pytest.raises(IndexMismatch, match="from byte 1000 on"):
        check(tmp_path, whole=True)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@given(st.integers(0, 300), st.integers(2, 70))
def test_sampled_indices_include_both_ends(count: int, max_samples: int) -> None:
    """All indices of a small range; of a large one a sorted sample with both ends."""
    indices = list(sample_indices(count, max_samples))
    assert indices == sorted(set(indices))
    assert min(count, max_samples - 2) <= len(indices) <= min(count, max_samples)
    assert not count or (indices[0], indices[-1]) == (0, count - 1)


def config(folder: Path, name: str) -> RetrieverConfig:
    index = str(folder / name)
    encoder = EncoderConfig("hash")
    return RetrieverConfig("hash", str(folder / "corpus.jsonl"), index, encoder=encoder)


def test_old_and_downloaded_indexes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index without checksums is served with a warning that names the command to add them.

    After that, damage and another corpus with as many documents are refused.
    """
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = ["--corpus_path", str(corpus), "--save_dir", str(tmp_path)]
    assert main(["--retrieval_method", "hash", "--model_path", "hash", *flags]) == 0
    bare = tmp_path / "e5_Flat.index"
    (tmp_path / "hash_Flat.index" / "vectors.faiss").rename(bare)
    caplog.set_level(logging.WARNING)
    build_retriever(config(tmp_path, bare.name))
    (warning,) = [record.message for record in caplog.records]
    command = warning.partition("add them: search-r1 index ")[2].split()
    assert command == ["checksums", "--index_path", str(bare)]
    assert main([*command, "--verify"]) == 2 and "has no checksums" in capsys.readouterr().err
    assert main(["checksums", "--verify"]) == 2 and "--corpus_path" in capsys.readouterr().err
    fresh = write_corpus(tmp_path / "fresh.jsonl")
    assert main(["checksums", "--verify", "--corpus_path", str(fresh)]) == 2
    assert f"{fresh} has no checksums" in capsys.readouterr().err
    assert main([*command, "--corpus_path", str(corpus)]) == 0
    assert main([*command, "--corpus_path", str(corpus), "--verify"]) == 0
    caplog.clear()
    build_retriever(config(tmp_path, bare.name))
    assert not caplog.records
    rows = corpus.read_bytes().split(b"\n")
    corpus.write_bytes(b"\n".join(rows[::-1]))
    with pytest.raises(IndexMismatch, match=r"got the corpus .* expected hash"):
        build_retriever(config(tmp_path, bare.name))
    flip(bare, 100)
    assert main([*command, "--verify"]) == 2 and "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("has_checksums", [True, False])
def test_an_index_is_served_from_within_its_folder(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_checksums: bool
) -> None:
    """`--index_path .` works, although this path has no file name."""
    shutil.copytree(built, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy" / "bm25")
    if not has_checksums:
        Path("checksums.json").unlink()
    assert build_retriever(RetrieverConfig("bm25", "../corpus.jsonl", ".")).num_documents == 8
    assert main(["checksums", "--index_path", "."]) == 0


def test_a_lucene_folder_gets_checksums(tmp_path: Path) -> None:
    """Lucene's lock file is ignored; an empty or missing folder is refused."""
    for name in ("nowhere", "empty"):
        assert main(["checksums", "--index_path", str(tmp_path / name)]) == 2
        (tmp_path / "empty").mkdir(exist_ok=True)
    (tmp_path / "segments_1").write_bytes(b"abc")
    assert main(["checksums", "--index_path", str(tmp_path)]) == 0
    (tmp_path / "write.lock").touch()
    assert check(tmp_path, whole=True) is not None


def test_a_corpus_edited_with_equal_mtime_is_refused(tmp_path: Path) -> None:
    """Equal size and mtime but other content is refused until the checksums are computed again."""
    path = write_corpus(tmp_path / "c.jsonl")
    Corpus.open(path)
    time = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("Paris is", "Paris as"))
    os.utime(path, ns=(time, time))
    with pytest.raises(SearchError, match="index checksums --corpus_path"):
        Corpus.open(path)
    assert main(["checksums", "--corpus_path", str(path)]) == 0
    assert Corpus.open(path)[0].text.startswith("Paris as")


def test_a_corpus_scanned_by_an_earlier_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets without checksums cause one scan, which adds them, or a warning if read-only."""
    path = write_corpus(tmp_path / "c.jsonl")
    Corpus.open(path)
    checksums.path_for(path).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        Corpus.open(path)
    assert "index checksums --corpus_path" in caplog.text and not checksums.path_for(path).exists()
    Corpus.open(path)
    assert check(path, whole=True) is not None


def test_a_rebuild_does_not_affect_an_opened_index(tmp_path: Path) -> None:
    """An opened index answers as before while a new build replaces its files."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = ["--retrieval_method", "hash", "--model_path", "hash", "--corpus_path", str(corpus)]
    assert main([*flags, "--save_dir", str(tmp_path)]) == 0
    opened = build_retriever(config(tmp_path, "hash_Flat.index"))
    before = opened.search(["capital of Austria"], 3)
    other = write_corpus(tmp_path / "other.jsonl", [("A", "alpha"), ("B", "beta")])
    other.replace(corpus)
    assert main([*flags, "--save_dir", str(tmp_path)]) == 0
    assert opened.search(["capital of Austria"], 3) == before
    assert build_retriever(config(tmp_path, "hash_Flat.index")).num_documents == 2
