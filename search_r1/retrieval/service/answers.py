"""The responses of the server, and the fast serialization of hits; `schema` is the client side."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import orjson
from pydantic import BaseModel

from search_r1.retrieval.schema import Document, Hit

BEGIN, SCORE, END = b'{"document":', b',"score":', b"}"
"""The parts of a hit in JSON: BEGIN, the document, SCORE, the score, END."""
SerializedHits = tuple[bytes, ...]
"""Hits in JSON, each without BEGIN and END. The garbage collector does not traverse bytes; the
objects of a hundred thousand cached hits would occupy it for a second, with all clients waiting."""


class RetrieveResponse(BaseModel):
    """Response to `POST /retrieve`: a list per query, best first, in the order of the queries."""

    result: list[list[Hit | Document]]


class DocumentResponse(BaseModel):
    """Response to `GET /document`."""

    document: dict[str, str]


class Health(BaseModel):
    """Response to `GET /health`, sent only while searches can be answered."""

    status: str
    retriever: str
    num_documents: int


def serialize_hits(hits: Sequence[Hit]) -> SerializedHits:
    """Serialize hits as JSON in UTF-8; lone surrogates become `?`."""
    return tuple(_to_json(hit)[len(BEGIN) : -len(END)] for hit in hits)


def _to_json(hit: Hit) -> bytes:
    try:
        return orjson.dumps(hit)
    except orjson.JSONEncodeError:  # lone surrogates
        text = json.dumps(asdict(hit), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def response_chunks(
    results: Sequence[SerializedHits], return_scores: bool, num_queries: int
) -> Iterator[bytes]:
    """Yield the JSON response in chunks with the results of `num_queries` queries each."""
    serialize = _with_scores if return_scores else _without_scores
    yield b'{"result":['
    for start in range(0, len(results), num_queries):
        chunk = b",".join(map(serialize, results[start : start + num_queries]))
        yield b"," + chunk if start else chunk
    yield b"]}"


def _with_scores(hits: SerializedHits) -> bytes:
    return b"[%b%b%b]" % (BEGIN, (END + b"," + BEGIN).join(hits), END) if hits else b"[]"


def _without_scores(hits: SerializedHits) -> bytes:
    return b"[%b]" % b",".join([hit[: hit.rindex(SCORE)] for hit in hits])
