"""The baseline server returns the same documents as our engine."""

import json
from pathlib import Path

import httpx
import pytest

from benchmarks.retrieval.answers import equal_up_to_ties
from benchmarks.retrieval.baseline_server import Search, create_app
from benchmarks.retrieval.corpora import encoder_folder
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.apps import running
from tests.retrieval.test_schema import to_wire

TOWNS = [
    ("Paris", "the capital of France on the Seine"),
    ("Lyon", "a city in France where two rivers meet"),
    ("Vienna", "the capital of Austria on the Danube"),
    ("Budapest", "the capital of Hungary on the Danube"),
    ("Zürich", "a city in Switzerland on a lake"),
    ("Bern", "the federal city of Switzerland"),
]
QUERIES = ["What is the capital of France?", "Danube", "a Swiss lake", "rivers that meet in a city"]


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_baseline_returns_the_documents_of_our_engine(tmp_path: Path, is_concurrent: bool) -> None:
    """With the same encoder and index, documents and scores are the same."""
    corpus, model = tmp_path / "corpus.jsonl", encoder_folder()
    rows = [{"id": str(i), "contents": f'"{t}"\n{x}'} for i, (t, x) in enumerate(TOWNS)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = build_index(BuildConfig("minilm", str(corpus), str(tmp_path), model))
    encoder = EncoderConfig(model)
    ours = build_retriever(RetrieverConfig("minilm", str(corpus), str(index), encoder=encoder))
    expected = to_wire(ours.search(QUERIES, 3), True)["result"]

    search = Search(str(corpus), str(index / "vectors.faiss"), model, str(tmp_path / "table"))
    body = {"queries": QUERIES, "topk": 3, "return_scores": True}
    with running(create_app(search, is_concurrent=is_concurrent)) as url:
        scored = httpx.post(f"{url}/retrieve", json=body).json()["result"]
        plain = httpx.post(f"{url}/retrieve", json={**body, "return_scores": False}).json()
    assert all(equal_up_to_ties(*pair) for pair in zip(scored, expected, strict=True))
    assert plain["result"] == [[hit["document"] for hit in hits] for hits in scored]
