"""A server of BM25 as a process of its own, and its client, over HTTP."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.local_server import LocalServer


def test_a_server_answers_as_its_engine(
    corpus_path: Path, open_engine: Callable[[str], Retriever], queries: list[str]
) -> None:
    """The client gets the engine's documents, and a plain request their ids and scores."""
    expected = open_engine("bm25").search(queries, 3)

    async def search(url: str) -> list[list[str]]:
        async with RetrievalClient(url, topk=3) as client:
            found = await asyncio.gather(*map(client.search, queries))
        return [[document.id for document in documents] for documents in found]

    body = {"queries": queries, "topk": 3, "return_scores": True}
    flags = ["--corpus_path", str(corpus_path), "--retriever_name", "bm25"]
    with LocalServer(flags) as server:
        got = asyncio.run(search(server.url))
        answer = httpx.post(f"{server.url}/retrieve", json=body, trust_env=False).json()["result"]
    ids = [[hit.document.id for hit in hits] for hits in expected]
    assert got == ids
    assert [[hit["document"]["id"] for hit in hits] for hits in answer] == ids
    scores = [[round(hit.score, 4) for hit in hits] for hits in expected]
    assert [[round(hit["score"], 4) for hit in hits] for hits in answer] == scores
