"""Which engine the settings name."""

from contextlib import suppress
from pathlib import Path

import pytest

from search_r1.search.backends import registry
from search_r1.search.backends.registry import build_retriever
from search_r1.search.errors import SetupError
from search_r1.search.settings import (
    EncoderConfig,
    RerankConfig,
    RetrieverConfig,
    TorchConfig,
)


@pytest.mark.parametrize("inner", [".", "bm25"])
def test_a_lucene_folder_under_the_name_bm25_is_lucenes(tmp_path: Path, inner: str) -> None:
    """The familiar `--retriever_name bm25 --index_path FOLDER` opens a published Lucene index."""
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    assert registry._choose(RetrieverConfig("bm25", "c", str(tmp_path))).module.endswith(".bm25")
    (folder / "segments_2").touch()
    assert registry._choose(RetrieverConfig("bm25", "c", str(tmp_path))).module.endswith(".lucene")


def test_an_unknown_dense_engine_is_refused() -> None:
    """A misspelt --dense_engine names what exists."""
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
def test_flags_of_other_backends_are_told(
    config: RetrieverConfig, unread: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """int8 without --dense_engine torch would be float32 without a word; what is read is silent."""
    with suppress(SetupError):  # there is no corpus
        build_retriever(config)
    told = [record.args for record in caplog.records if "does not read" in record.msg]
    assert told == ([(config.retriever_name, *unread)] if unread else [])


def test_every_row_names_a_module_of_its_package() -> None:
    """No row points to an engine that is not there."""
    root = Path(registry.__file__).parents[3]
    rows = [*registry.BACKENDS.values(), registry.FAISS, registry.TORCH, registry.RERANKER]
    for row in rows:
        assert (root / (row.module.replace(".", "/") + ".py")).is_file(), row
