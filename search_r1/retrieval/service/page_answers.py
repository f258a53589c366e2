"""What the search page asks beyond `/retrieve`; imported at the first such request.

`start`: questions that the corpus answers, and what else can be searched. `why`: the parts of each
hit's score. `beside`: another engine's or server's documents. `recall`: of a question set. These
routes belong to the page and may change with it; programs use `/retrieve`.
"""

import asyncio
import importlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import HTTPException, Request
from pydantic import BaseModel, Field

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever, RowRetriever
from search_r1.retrieval.schema import Document, Hit
from search_r1.retrieval.service.batching import Batcher
from search_r1.retrieval.service.requests import parse, read_body
from search_r1.retrieval.settings import ServiceConfig

NUM_EXAMPLES, NUM_CANDIDATES, EXAMPLE_TOPK = 4, 48, 3
"""Examples on the first screen; passages of which they are made; a passage must be among the first
EXAMPLE_TOPK documents of its question."""
CUTOFFS = (1, 3, 5, 10)
"""Numbers of documents for which recall is counted."""
MAX_QUESTIONS, MAX_MISSED, CHUNK = 2000, 50, 64
"""Questions of a set; missed ones that are listed; questions searched at once."""
PEER_TIMEOUT_S = 30.0
RULE = "search_r1.rewards.normalize"
"""The module of the rule of evaluations; retrieval itself needs no rewards."""
ENGLISH = re.compile(r"The (?P<subject>[^.,;:()]{3,60}?) (?P<verb>is|are|was|were) \S")
CHINESE = re.compile(r"(?P<subject>[^，。；：（）\s]{2,24}?)是[^，。]+。")
ANSWERS = ("golden_answers", "answers", "answer")
"""Names of the accepted answers in a row of a pasted set."""
TITLE_LENGTHS = range(3, 61)

Search = Callable[[Sequence[str], int], Awaitable[list[list[Document]]]]


class AskedService(Protocol):
    """The service whose page asks."""

    config: ServiceConfig
    batcher: Batcher
    retriever: Retriever
    engine: Retriever
    """The retriever without what keeps its results."""


class WhyRequest(BaseModel):
    """A query whose hits are explained."""

    query: Annotated[str, Field(max_length=16384)]
    topk: Annotated[int, Field(ge=1)]


class BesideRequest(WhyRequest):
    """A query for another engine or server."""

    beside: str


class RecallRequest(BaseModel):
    """A question set as text, one question a line."""

    text: str
    beside: str | None = None


async def answer(service: AskedService, name: str, request: Request) -> Any:
    """Return the JSON answer to one of the page's questions; raises HTTPException, SearchError."""
    if name not in QUESTIONS:
        raise HTTPException(404, f"the page has no question {name!r}")
    body = await read_body(request, service.config.max_body_bytes, service.config.deadline)
    return await QUESTIONS[name](service, body)


async def start(service: AskedService, body: bytes) -> dict[str, Any]:
    """Return examples and the names of what can be searched beside this engine."""
    asked = await service.batcher.run(partial(examples, service.engine))
    return {"examples": asked, "beside": [*parts_of(service), *service.config.compare_with]}


async def why(service: AskedService, body: bytes) -> dict[str, Any]:
    """Return the parts of each hit's score, best first; null if the engine has only one number."""
    asked = parse(body, WhyRequest)
    check_topk(service, asked.topk)
    explain = getattr(service.engine, "explain", None)
    if explain is None:
        return {"parts": None}
    parts = await service.batcher.run(partial(explain, asked.query, asked.topk))
    return {"parts": [sorted(part.items(), key=lambda item: -item[1]) for part in parts]}


async def beside(service: AskedService, body: bytes) -> dict[str, Any]:
    """Return the documents of another engine or server, best first."""
    asked = parse(body, BesideRequest)
    check_topk(service, asked.topk)
    [documents] = await column(service, asked.beside)([asked.query], asked.topk)
    return {"documents": [asdict(document) for document in documents]}


async def recall(service: AskedService, body: bytes) -> dict[str, Any]:
    """Return the share of questions with an accepted answer in the first documents, by engine."""
    asked = parse(body, RecallRequest)
    questions = list(read_questions(asked.text))
    names = [service.engine.name, *([asked.beside] if asked.beside else [])]
    cutoffs = [k for k in CUTOFFS if k <= service.config.max_topk]
    columns: list[dict[str, Any]] = []
    missed: list[str] = []
    for number, name in enumerate(names):
        search = column(service, name) if number else partial(own, service, service.retriever)
        ranks = await first_ranks(search, questions, cutoffs[-1])
        found = {k: sum(rank <= k for rank in ranks) for k in cutoffs}
        columns.append({"name": name, "found": found})
        if not number:
            pairs = zip(questions, ranks, strict=True)
            missed = [question for (question, _), rank in pairs if rank > cutoffs[-1]]
    return {"questions": len(questions), "columns": columns, "missed": missed[:MAX_MISSED]}


QUESTIONS = {"start": start, "why": why, "beside": beside, "recall": recall}


async def first_ranks(
    search: Search, questions: Sequence[tuple[str, list[str]]], k: int
) -> list[float]:
    """Return the rank of the first document that contains an answer; infinite if none does."""
    ranks, contains_answer = [], importlib.import_module(RULE).contains_answer
    for begin in range(0, len(questions), CHUNK):
        chunk = questions[begin : begin + CHUNK]
        found = await search([question for question, _ in chunk], k)
        for (_, accepted), documents in zip(chunk, found, strict=True):
            hits = (i for i, d in enumerate(documents, 1) if contains_answer(d.contents, accepted))
            ranks.append(next(hits, float("inf")))
    return ranks


def check_topk(service: AskedService, topk: int) -> None:
    """Raise a 422 for more documents than the server allows."""
    if topk > (limit := service.config.max_topk):
        raise HTTPException(422, f"topk is {topk}; expected {limit} or less: see --max_topk")


def parts_of(service: AskedService) -> dict[str, RowRetriever]:
    """Return the engines that a hybrid joins, by name."""
    parts: dict[str, RowRetriever] = getattr(service.engine, "parts", {})
    return parts


def column(service: AskedService, name: str) -> Search:
    """Return the search of a part of a hybrid, or of a server of --compare_with; raises a 422."""
    if (part := parts_of(service).get(name)) is not None:
        return partial(own, service, part)
    if name in service.config.compare_with:
        return partial(of_peer, name)
    known = [*parts_of(service), *service.config.compare_with]
    raise HTTPException(422, f"beside is {name!r}; expected one of {known}: see --compare_with")


async def own(
    service: AskedService, engine: Retriever | RowRetriever, queries: Sequence[str], k: int
) -> list[list[Document]]:
    """Search in this process, between two batches of other clients."""
    found: list[list[Hit]] = await service.batcher.run(partial(engine.search, queries, k))
    return [[hit.document for hit in hits] for hits in found]


async def of_peer(url: str, queries: Sequence[str], k: int) -> list[list[Document]]:
    """Search on another server, once."""
    async with RetrievalClient(url, k, timeout=PEER_TIMEOUT_S, max_retries=0) as client:
        return await asyncio.gather(*map(client.search, queries))


def read_questions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield question and answers of each line, JSON or separated by tabs; raises a 422.

    Example: ``{"question": "Who …?", "golden_answers": ["A", "B"]}`` or ``Who …?<tab>A<tab>B``.
    """
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_QUESTIONS:
        raise HTTPException(422, f"got {len(lines)} questions; expected 1 to {MAX_QUESTIONS}")
    for number, line in lines:
        question, answers = read_line(line)
        if not question or not answers or not all(isinstance(text, str) for text in answers):
            expected = 'a question, a tab and its answer, or {"question": …, "golden_answers": […]}'
            raise HTTPException(422, f"line {number}: got {line[:80]!r}; expected {expected}")
        yield question, answers


def read_line(line: str) -> tuple[str, list[Any]]:
    """Return question and answers of a line; empty where they are missing."""
    if not line.lstrip().startswith("{"):
        question, *answers = (part.strip() for part in line.split("\t"))
        return question, [answer for answer in answers if answer]
    try:
        row = json.loads(line)
    except ValueError:
        return "", []
    found: Any = next((row[name] for name in ANSWERS if row.get(name)), [])
    answers = found if isinstance(found, list) else [found]
    return str(row.get("question") or ""), answers


def examples(engine: Retriever) -> list[str]:
    """Return questions whose passages the engine finds: as sentences, else titles of passages."""
    corpus = getattr(engine, "corpus", None)
    if not isinstance(corpus, Corpus):
        return []
    step = max(1, len(corpus) // NUM_CANDIDATES)
    passages = corpus.documents(range(0, len(corpus), step)[:NUM_CANDIDATES])
    asked = {query: passage.id for passage in passages if (query := question_about(passage))}
    results = engine.search(list(asked), EXAMPLE_TOPK)
    answered = [query for (query, id), hits in zip(asked.items(), results, strict=True)
                if any(hit.document.id == id for hit in hits)]  # fmt: skip
    chosen = [query for query in answered if query.endswith(("?", "？"))] or answered
    return chosen[:: max(1, len(chosen) // NUM_EXAMPLES)][:NUM_EXAMPLES]


def question_about(document: Document) -> str | None:
    """Return a question that the beginning of the passage answers, or else its title.

    Example: "The area of Oslo is 454 square km." gives "What is the area of Oslo?".
    """
    text = document.text.strip()
    if match := ENGLISH.match(text):
        return f"What {match['verb']} the {match['subject']}?"
    if match := CHINESE.match(text):
        return f"{match['subject']}是什么？"
    return document.title if len(document.title) in TITLE_LENGTHS else None
