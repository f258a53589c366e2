"""The choice of the backend by the settings."""

import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from search_r1.retrieval.engines import registry
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.settings import (
    EncoderConfig,
    RerankConfig,
    RetrieverConfig,
    TorchConfig,
)
from verl.errors import UserError

SQLITE = f"{Path(__file__).parents[3] / 'example/engines/sqlite.py'}:Sqlite"


@pytest.mark.parametrize("inner", [".", "bm25"])
def test_a_lucene_folder_under_the_name_bm25_is_lucenes(tmp_path: Path, inner: str) -> None:
    """`--retriever_name bm25 --index_path FOLDER` opens a Lucene index."""
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    assert registry._choose(RetrieverConfig("bm25", "c", str(tmp_path))).module.endswith(".bm25")
    (folder / "segments_2").touch()
    assert registry._choose(RetrieverConfig("bm25", "c", str(tmp_path))).module.endswith(".lucene")


def test_an_unknown_dense_engine_is_refused() -> None:
    """The error for an unknown --dense_engine names the valid values."""
    config = RetrieverConfig(
        "e5", "c", "i", encoder=EncoderConfig("hash"), torch=TorchConfig(dense_engine="jax")
    )
    with pytest.raises(SetupError, match="expected faiss or torch"):
        build_retriever(config)


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        (RetrieverConfig("bm25", encoder=EncoderConfig("hash")), ["--retriever_model"]),
        (RetrieverConfig("e5", encoder=EncoderConfig("hash"), torch=TorchConfig("torch")), []),
        (
            RetrieverConfig("e5", encoder=EncoderConfig("hash"), torch=TorchConfig(rescore=20)),
            ["--rescore"],
        ),
        (RetrieverConfig("empty", rerank=RerankConfig(retrieval_topk=50)), ["--retrieval_topk"]),
    ],
)
def test_flags_of_other_backends_are_logged(
    config: RetrieverConfig, unread: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A flag that the backend does not read, such as --rescore for FAISS, is a warning."""
    with suppress(SetupError):  # there is no corpus
        build_retriever(config)
    warnings = [record.args for record in caplog.records if "does not read" in record.msg]
    assert warnings == ([(config.retriever_name, *unread)] if unread else [])


def test_every_entry_names_an_existing_module() -> None:
    """Each entry of the registry points to a module that exists."""
    root = Path(registry.__file__).parents[3]
    entries = [*registry.BACKENDS.values(), registry.FAISS, registry.TORCH, registry.RERANKER]
    for entry in entries:
        assert (root / (entry.module.replace(".", "/") + ".py")).is_file(), entry


def test_a_backend_is_one_file_of_the_user() -> None:
    """`--retriever_name path/file.py:Name` is served, here SQLite's full-text search."""
    corpus = Path(__file__).parents[3] / "example" / "corpus.jsonl"
    flags = ["--retriever_name", SQLITE, "--corpus_path", str(corpus)]
    with LocalServer(flags) as server:
        answer = httpx.post(
            f"{server.url}/retrieve", json={"queries": ["What is the capital of France?", "?"]}
        )
    first, none = answer.json()["result"]
    assert "Paris" in first[0]["contents"] and none == []


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("pass", "search"),
        ("search = info = name = num_threads = 1", "num_documents"),
        ("1 / 0", ""),
    ],
)
def test_a_file_that_is_no_backend_is_refused(tmp_path: Path, body: str, missing: str) -> None:
    """What the object lacks is named."""
    file = tmp_path / "own.py"
    file.write_text(f"class Own:\n    def __init__(self, config): pass\n    {body}\n")
    with pytest.raises(UserError) as error:
        build_retriever(RetrieverConfig(f"{file}:Own"))
    assert "--retriever_name" in str(error.value) and missing in str(error.value)


def test_a_misspelt_name_gets_the_nearest() -> None:
    """A typo is not told to add an encoder; a name that is like no other is."""
    for name, fix in (("bm52", "did you mean bm25?"), ("e5", "--retriever_model")):
        with pytest.raises(SetupError) as error:
            build_retriever(RetrieverConfig(name))
        assert fix in str(error.value)


def test_a_deleted_part_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `search_r1/online` the message does not advise to install a package."""
    for name in ("search_r1.online", "search_r1.online.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SetupError, match=r"search_r1\.online") as caught:
        build_retriever(RetrieverConfig("serper"))
    assert "restore" in str(caught.value) and "pip" not in str(caught.value)
