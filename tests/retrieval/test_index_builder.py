"""Building indexes: manifests, mismatches, atomicity, and missing settings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import CorpusError, IndexMismatch, SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index, main
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.conftest import write_corpus

ROW = '{{"id": "{0}", "contents": "\\"T{0}\\"\\nsome words {0}"}}\n'


def write(path: Path, ids: str) -> Path:
    path.write_text("".join(ROW.format(i) for i in ids))
    return path


@pytest.mark.parametrize("method", ["bm25", "hash"])
def test_another_corpus_is_refused(tmp_path: Path, method: str) -> None:
    """An index of another corpus of equal size is refused; the message names both and the fix."""
    corpus, other = write(tmp_path / "a.jsonl", "123"), write(tmp_path / "b.jsonl", "132")
    build_index(BuildConfig(method, str(corpus), str(tmp_path), model_path="hash"))
    config = RetrieverConfig(method, str(other), str(tmp_path), encoder=EncoderConfig("hash"))
    with pytest.raises(IndexMismatch) as caught:
        build_retriever(config)
    message = str(caught.value)
    for path in (corpus, other):
        assert Corpus.open(path).fingerprint.digest in message
    assert "again: `python -m search_r1.search.index_builder" in message


def test_failed_build_leaves_the_old_index(tmp_path: Path) -> None:
    """A build that fails on a malformed row keeps the old index and leaves no other files."""
    corpus = write(tmp_path / "a.jsonl", "123")
    folder = build_index(BuildConfig("bm25", str(corpus), str(tmp_path / "out")))
    before = Manifest.load(folder)
    with corpus.open("a") as file:
        file.write('{"id": "4"}\n')
    with pytest.raises(CorpusError, match="row 4"):
        build_index(BuildConfig("bm25", str(corpus), str(tmp_path / "out")))
    assert Manifest.load(folder) == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bm25"]


def test_default_index_follows_the_corpus(tmp_path: Path) -> None:
    """Without an index path, BM25 builds an index, and rebuilds it if the corpus has changed."""
    corpus = write(tmp_path / "a.jsonl", "123")
    config = RetrieverConfig("bm25", str(corpus))
    assert build_retriever(config).num_documents == 3
    built = (tmp_path / "index" / "a" / "bm25" / "manifest.json").stat().st_mtime_ns
    assert build_retriever(config).num_documents == 3
    assert (tmp_path / "index" / "a" / "bm25" / "manifest.json").stat().st_mtime_ns == built
    write(corpus, "12345")
    assert build_retriever(config).search(["some words"], 9)[0][4].document.id == "5"


def test_command_line_with_the_original_flags(tmp_path: Path) -> None:
    """The module runs as a command and writes a manifest with corpus and count."""
    corpus = write(tmp_path / "a.jsonl", "123")
    command = [sys.executable, "-m", "search_r1.retrieval.index_builder", "--faiss_type", "Flat"]
    command += ["--retrieval_method", "bm25", "--corpus_path", str(corpus)]
    subprocess.run([*command, "--save_dir", str(tmp_path), "--save_embedding"], check=True)
    manifest = json.loads((tmp_path / "bm25" / "manifest.json").read_text())
    assert (manifest["engine"], manifest["count"]) == ("bm25", 3)
    assert manifest["corpus"]["digest"] == Corpus.open(corpus).fingerprint.digest


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--retrieval_method", "bm25", "--corpus_path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--retrieval_method", "e5"], "--model_path"),
        (["--retrieval_method", "e5", "--model_path", "/nowhere"], "set --model_path"),
        (["--retrieval_method", "e5", "--model_path", "hash", "--pooling_method", "mean"], "'sum'"),
        (["--retrieval_method", "e5", "--model_path", "hash:0"], "got '0' dimensions"),
        (["--retrieval_method", "e5", "--model_path", "hash:x"], "got 'x' dimensions"),
        (["--retrieval_method", "bm25", "--faiss_type", "HNSW64"], "a name for a dense"),
    ],
)
def test_bad_settings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    """An invalid setting ends with status 2 and a one-line message."""
    defaults = ["--corpus_path", str(write(tmp_path / "a.jsonl", "1"))]
    assert main([*defaults, "--save_dir", str(tmp_path), *flags]) == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("method", ["bm25", "e5"])
def test_a_full_disk_is_one_line(tmp_path: Path, method: str) -> None:
    """A build that cannot write ends with status 2 and names the file."""
    corpus = write(tmp_path / "a.jsonl", "123")
    Corpus.open(corpus)
    flags = ["--retrieval_method", method, "--model_path", "hash", "--corpus_path", str(corpus)]
    code = (
        "import resource, sys; from search_r1.retrieval.index_builder import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *flags, "--save_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (RetrieverConfig("bm25"), "--corpus_path"),
        (RetrieverConfig("bm25", "CORPUS", "/nowhere"), "/nowhere does not exist"),
        (RetrieverConfig("bm52", "CORPUS"), "one of bm25, lucene"),
        (RetrieverConfig("e5", "CORPUS", encoder=EncoderConfig("m")), "without --index_path"),
    ],
)
def test_missing_settings_are_named(tmp_path: Path, config: RetrieverConfig, problem: str) -> None:
    """The error for a missing setting names the flag that fixes it."""
    path = write(tmp_path / "a.jsonl", "1") if config.corpus_path else None
    values = {**vars(config), "corpus_path": path and str(path)}
    with pytest.raises(SetupError, match=problem):
        build_retriever(RetrieverConfig(**values))


@pytest.mark.parametrize(("method", "name"), [("bm25", "bm25/segments_1"), ("e5", "e5_Flat.index")])
def test_a_download_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, name: str
) -> None:
    """A downloaded index, which has the same name as a build, is not overwritten."""
    corpus, published = write(tmp_path / "a.jsonl", "123"), tmp_path / name
    published.parent.mkdir(exist_ok=True)
    published.write_bytes(b"64 GB")
    flags = ["--retrieval_method", method, "--model_path", "hash", "--corpus_path", str(corpus)]
    assert main([*flags, "--save_dir", str(tmp_path)]) == 2
    assert "another --save_dir" in capsys.readouterr().err
    assert published.read_bytes() == b"64 GB"


BUILD_WITH_KILLS = """
import os, signal, sys
import bm25s, faiss
from search_r1.retrieval.index_builder import main
left, sync = 0, os.fsync
def fsync(handle):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(handle)
os.fsync = fsync
for moment in sys.argv[1].split(","):
    child = os.fork()
    if not child:
        left = int(moment)
        sys.exit(main(sys.argv[2:]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    there = os.path.isdir(sys.argv[-1]) and [n for n in os.listdir(sys.argv[-1]) if n[0] != "."]
    print(len(there or []), flush=True)
"""
"""Runs the builder in child processes, each killed with SIGKILL before its n-th fsync.

Prints each exit code, and the number of visible indexes after it."""


@pytest.mark.parametrize(("method", "moments"), [("bm25", [1, 3, 9]), ("e5", [1, 3, 10])])
def test_a_killed_build_resumes(tmp_path: Path, method: str, moments: list[int]) -> None:
    """A build that is killed repeatedly gives the same index as an undisturbed one."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(ROW.format(i) for i in range(61)))
    flags = ["--retrieval_method", method, "--corpus_path", str(corpus), "--model_path", "hash"]
    flags += ["--shard_rows", "8", "--save_dir"]
    undisturbed = tmp_path / "undisturbed"
    assert main([*flags, str(undisturbed)]) == 0
    times = ",".join(map(str, [*moments, 1000]))
    command = [sys.executable, "-c", BUILD_WITH_KILLS, times, *flags, str(tmp_path / "killed")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    ends = [word for word in done.stdout.split() if word.lstrip("-").isdigit()]
    assert ends == ["-9", "0"] * len(moments) + ["0", "1"], "half an index is visible"
    assert "resuming the work" in done.stderr
    (reference,), (resumed,) = undisturbed.iterdir(), (tmp_path / "killed").iterdir()
    for path in reference.iterdir():
        if path.name != "manifest.json":
            assert (resumed / path.name).read_bytes() == path.read_bytes(), path.name
    facts = [json.loads((p / "manifest.json").read_text()) for p in (reference, resumed)]
    assert facts[0] | {"created": ""} == facts[1] | {"created": ""}


def test_an_index_is_served_from_within_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--index_path .` works, although this path has no file name."""
    corpus = str(write_corpus(tmp_path / "corpus.jsonl"))
    flags = ["--retrieval_method", "bm25", "--corpus_path", corpus, "--save_dir", str(tmp_path)]
    assert main(flags) == 0
    monkeypatch.chdir(tmp_path / "bm25")
    assert build_retriever(RetrieverConfig("bm25", "../corpus.jsonl", ".")).num_documents == 8


def test_the_fallen_command_checksums_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer names what took its place."""
    assert main(["checksums", "--index_path", "x"]) == 2
    assert "--verify" in capsys.readouterr().err


def test_a_rebuild_does_not_affect_an_opened_index(tmp_path: Path) -> None:
    """An opened index answers as before while a new build replaces its files."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    flags = ["--retrieval_method", "hash", "--model_path", "hash", "--corpus_path", str(corpus)]
    assert main([*flags, "--save_dir", str(tmp_path)]) == 0
    config = RetrieverConfig(
        "hash", str(corpus), str(tmp_path / "hash_Flat.index"), encoder=EncoderConfig("hash")
    )
    opened = build_retriever(config)
    before = opened.search(["capital of Austria"], 3)
    other = write_corpus(tmp_path / "other.jsonl", [("A", "alpha"), ("B", "beta")])
    other.replace(corpus)
    assert main([*flags, "--save_dir", str(tmp_path)]) == 0
    assert opened.search(["capital of Austria"], 3) == before
    assert build_retriever(config).num_documents == 2
