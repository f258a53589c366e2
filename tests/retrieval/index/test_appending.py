"""Passages added to a corpus: the indexes are those of the longer corpus, also after a kill."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import CorpusError, IndexMismatch, SearchError, SetupError
from search_r1.retrieval.index import appending
from search_r1.retrieval.index_builder import AppendConfig, BuildConfig, build_index, main
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

pytest.importorskip("faiss")
MODEL = "hash:32"
TEXTS = [f'"T{n}"\nwords {n} of passage {n * n} river' for n in range(90)]
QUERIES = ["passage 64 river", "words 7", "T88", "river"]


def write(path: Path, numbers: Sequence[int]) -> Path:
    rows = [json.dumps({"id": f"d{n}", "contents": TEXTS[n]}) for n in numbers]
    path.write_text("\n".join(rows))  # without a newline at the end
    return path


def build(corpus: Path, folder: Path, factory: str = "Flat") -> None:
    build_index(BuildConfig("bm25+bag", str(corpus), str(folder), MODEL, faiss_type=factory))


@pytest.fixture
def world(tmp_path: Path) -> tuple[Path, Path, AppendConfig]:
    """A corpus of 60 passages with both indexes, and 30 new ones."""
    corpus, folder = write(tmp_path / "corpus.jsonl", range(60)), tmp_path / "index"
    new = write(tmp_path / "new.jsonl", range(60, 90))
    build(corpus, folder)
    return corpus, folder, AppendConfig(str(new), str(corpus), str(folder), MODEL)


def check_equal_to_a_fresh_build(corpus: Path, folder: Path) -> None:
    """Hits and scores of each engine are those of a corpus that had all passages from the start."""
    other = corpus.parent / "fresh"
    other.mkdir()
    build(write(other / "corpus.jsonl", range(90)), other / "index")
    assert [d.contents for d in Corpus.open(corpus)] == TEXTS
    for name in ("bm25", "bag"):
        appended, fresh = (
            build_retriever(
                RetrieverConfig(name, str(root), str(index), True, encoder=EncoderConfig(MODEL))
            )
            for root, index in ((corpus, folder), (other / "corpus.jsonl", other / "index"))
        )
        assert appended.search(QUERIES, 5) == fresh.search(QUERIES, 5)


def test_indexes_equal_those_of_the_longer_corpus(world: tuple[Path, Path, AppendConfig]) -> None:
    """By the command; --verify finds manifests and hashes right; no other file is left."""
    corpus, folder, config = world
    flags = ["--passages", config.passages, "--corpus_path", str(corpus), "--save_dir", str(folder)]
    assert main(["append", *flags, "--model_path", MODEL]) == 0
    check_equal_to_a_fresh_build(corpus, folder)
    assert not [path for path in corpus.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_killed_run_continues(
    world: tuple[Path, Path, AppendConfig], done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before, between or behind the indexes, the same command ends as if it never was."""
    corpus, folder, config = world
    append, calls = appending._append, []

    def stop_later(*arguments: object) -> None:
        if len(calls) == done:
            raise KeyboardInterrupt
        calls.append(append(*arguments))  # type: ignore[arg-type, func-returns-value]

    with monkeypatch.context() as patch:
        patch.setattr(appending, "_append", stop_later)
        if done == 2:
            patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            appending.run(config)
    assert appending.run(config) == 0
    check_equal_to_a_fresh_build(corpus, folder)


@pytest.mark.parametrize(
    ("passages", "changes", "error"),
    [
        ('{"id": "d7", "text": "x"}', {}, CorpusError),
        ('{"id": "n", "text": "x"}\n{"id": "n", "text": "y"}', {}, CorpusError),
        ('{"id": "n"}', {}, CorpusError),
        ("", {}, CorpusError),
        ('{"id": "n", "text": "x"}', {"save_dir": "nowhere"}, SetupError),
        ('{"id": "n", "text": "x"}', {"model_path": "hash:16"}, IndexMismatch),
        ('{"id": "n", "text": "x"}', {"model_path": None}, SetupError),
        ('{"id": "n", "text": "x"}', {"corpus_path": "new.jsonl"}, SearchError),
    ],
)
def test_what_does_not_fit_changes_nothing(
    world: tuple[Path, Path, AppendConfig],
    passages: str,
    changes: dict[str, str | None],
    error: type[SearchError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, folder, config = world
    monkeypatch.chdir(corpus.parent)
    Path(config.passages).write_text(passages)
    before = corpus.read_bytes(), (folder / "bm25/manifest.json").read_bytes()
    with pytest.raises(error):
        appending.run(AppendConfig(**{**vars(config), **changes}))
    assert not [path for path in corpus.parent.iterdir() if path.name.endswith(".appending")]
    assert before == (corpus.read_bytes(), (folder / "bm25/manifest.json").read_bytes())


def test_a_graph_gets_the_new_vectors(tmp_path: Path) -> None:
    """HNSW and quantizers are appended to as they are; the manifest keeps their factory."""
    corpus, folder = write(tmp_path / "corpus.jsonl", range(60)), tmp_path / "index"
    build(corpus, folder, "HNSW8")
    shutil.rmtree(folder / "bm25")
    new = write(tmp_path / "new.jsonl", range(60, 90))
    assert appending.run(AppendConfig(str(new), str(corpus), str(folder), MODEL)) == 0
    engine = build_retriever(
        RetrieverConfig("bag", str(corpus), str(folder), encoder=EncoderConfig(MODEL))
    )
    assert engine.search(["T88 words 88 of passage 7744 river"], 1)[0][0].document.id == "d88"


def test_titles_and_texts_of_their_own_stay(world: tuple[Path, Path, AppendConfig]) -> None:
    """A text of two lines gets no title from its first, and a title beside contents stays."""
    corpus, _, config = world
    rows = [{"id": "a", "text": "one\ntwo"}, {"id": "b", "title": "T", "contents": "y"}]
    Path(config.passages).write_text("\n".join(map(json.dumps, rows)))
    new = list(Corpus.open(config.passages))
    appending.run(config)
    assert list(Corpus.open(corpus))[60:] == new


def test_vectors_that_are_no_numbers_change_nothing(
    world: tuple[Path, Path, AppendConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a vector would stay in the index, and its passage would never be found."""
    corpus, folder, config = world
    manifest = folder / "bag_Flat.index" / "manifest.json"
    before = corpus.read_bytes(), manifest.read_bytes()
    encode = HashEncoder.encode_passages

    def overflowing(self: HashEncoder, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = encode(self, passages)
        vectors[[TEXTS[89] in passage for passage in passages]] = np.nan
        return vectors

    monkeypatch.setattr(HashEncoder, "encode_passages", overflowing)
    with pytest.raises(IndexMismatch, match="not finite"):
        appending.run(config)
    assert (corpus.read_bytes(), manifest.read_bytes()) == before
