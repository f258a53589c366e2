"""The baseline: a server that works like the original Search-R1's, in our own code.

Each request is encoded separately and searched separately, and its documents are read row by row
from a `datasets` table. Requests take turns; with `--concurrent` they run concurrently in the
framework's thread pool. Benchmarks compare with the faster of the two.
"""

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
import faiss
import numpy as np
import numpy.typing as npt
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

from search_r1.retrieval.service.running import bind, write_port

MAX_LENGTH = 256


class Request(BaseModel):
    """The body of `POST /retrieve`."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class Encoder:
    """A transformer with mean pooling, which encodes each request as one padded batch."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval()

    @torch.no_grad()
    def encode(self, texts: list[str]) -> npt.NDArray[np.float32]:
        """Encode texts into L2-normalised vectors, (num_texts, dim) float32."""
        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        states = self._model(**batch).last_hidden_state  # (num_texts, length, dim)
        mask = batch["attention_mask"].unsqueeze(-1)
        means = (states * mask).sum(dim=1) / mask.sum(dim=1)
        vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(means, dim=-1).numpy()
        return vectors


class Search:
    """Encodes queries, searches the index and reads the documents."""

    def __init__(self, corpus_path: str, index_file: str, model: str, cache: str | None) -> None:
        self._encoder = Encoder(model)
        self._index = faiss.read_index(index_file)
        self._corpus = datasets.load_dataset(
            "json", data_files=corpus_path, split="train", cache_dir=cache
        )

    def __call__(self, queries: list[str], k: int) -> list[list[dict[str, Any]]]:
        """Return `k` documents with scores per query."""
        scores, rows = self._index.search(self._encoder.encode(queries), k)
        return [
            [
                {"document": self._corpus[int(i)], "score": float(s)}
                for i, s in zip(*pair, strict=True)
            ]
            for pair in zip(rows, scores, strict=True)
        ]


def create_app(search: Any, *, is_concurrent: bool = False) -> FastAPI:
    """Create the application; requests take turns unless `is_concurrent`."""
    app = FastAPI()
    lock = contextlib.nullcontext() if is_concurrent else threading.Lock()

    @app.post("/retrieve")
    def retrieve(request: Request) -> Any:
        with lock:
            result = search(request.queries, request.topk or 3)
        if request.return_scores:
            return {"result": result}
        return {"result": [[hit["document"] for hit in hits] for hits in result]}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    parser = argparse.ArgumentParser(prog="baseline_server", description=__doc__)
    parser.add_argument("--corpus_path", required=True, help="jsonl with id and contents")
    parser.add_argument("--index_file", required=True, help="FAISS file")
    parser.add_argument("--model", required=True, help="encoder folder")
    parser.add_argument("--cache", type=Path, help="folder for the `datasets` table")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--port_file", type=Path, help="receives the port")
    parser.add_argument("--threads", type=int, default=0, help="0: the libraries' default")
    parser.add_argument("--concurrent", action="store_true", help="requests do not take turns")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
        faiss.omp_set_num_threads(args.threads)
    cache = str(args.cache) if args.cache else None
    search = Search(args.corpus_path, args.index_file, args.model, cache)
    app = create_app(search, is_concurrent=args.concurrent)
    with bind(args.host, args.port) as bound:
        bound.listen()  # Connections wait from now on, before uvicorn accepts them.
        if args.port_file:
            write_port(args.port_file, bound.getsockname()[1])
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[bound])
    return 0


if __name__ == "__main__":
    sys.exit(main())
