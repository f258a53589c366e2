"""Fake backends whose calls are recorded and can be blocked, and helpers for requests."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from search_r1.retrieval.schema import Document, Hit


def hits_of(query: str, k: int) -> list[Hit]:
    """Return the hits of FakeBackend: k documents with ids of query, k and rank."""
    return [
        Hit(Document.from_title(f"{query}/{k}/{rank}", query, "text"), 1 / (rank + 3))
        for rank in range(k)
    ]


class FakeBackend:
    """Records its calls; blocks while `gate` is cleared, and fails for some queries."""

    name = "fake"
    num_documents = 1

    def __init__(self, *, num_threads: int = 1, failures: dict[str, Exception] | None = None):
        self.num_threads = num_threads
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.failures = failures or {}
        self.facts: dict[str, Any] = {"engine": "fake"}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.calls.append((list(queries), k))
        self.entered.release()
        assert self.gate.wait(30)
        for query in queries:
            if query in self.failures:
                raise self.failures[query]
        return [hits_of(query, k) for query in queries]

    def info(self) -> dict[str, Any]:
        return self.facts


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def client(app: Any, token: str | None = None) -> httpx.AsyncClient:
    """Return a client of an app in this process."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


async def ask(http: httpx.AsyncClient, *queries: str, **fields: Any) -> httpx.Response:
    """Send a request to /retrieve."""
    return await http.post("/retrieve", json={"queries": queries, **fields})


def ids(response: httpx.Response) -> list[list[str]]:
    """Return the document ids of each query."""
    return [[document["id"] for document in hits] for hits in response.json()["result"]]


def metric(app: Any, sample: str) -> float:
    """Return the value of one line of /metrics, or 0 if it is missing."""
    for line in app.state.service.metrics.text().decode().splitlines():
        if line.startswith(f"{sample} "):
            return float(line.rpartition(" ")[2])
    return 0.0
