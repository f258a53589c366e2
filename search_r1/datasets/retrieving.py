"""Documents for questions that are asked without searching: from a server, or from a cache file.

A cache is the original's: a JSON object from the question to its hits, best first, each with the
`id` of a passage of the corpus.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_r1.datasets.question import Question, as_question
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SearchError
from search_r1.search.index.progress import progress
from search_r1.search.schema import Document
from verl.errors import ConfigError, DataError, ToolError, explain
from verl.files import regular

AT_ONCE = 512
"""Questions that wait for the server at one time."""


Finder = Callable[[Sequence[Question]], list[list[Document]]]
"""Gives the documents of each question, best first."""


def server_finder(url: str, topk: int) -> Finder:
    """Asks a retrieval server, `topk` documents a question.

    Raises ConfigError for an address that is none; the finder ToolError where nobody answers.
    """
    try:
        client = RetrievalClient(url, topk)
    except ValueError as error:
        fix = "give --retriever_url http://HOST:PORT/retrieve"
        raise ConfigError(explain("--retriever_url", str(error), "an address", fix)) from error

    def find(questions: Sequence[Question]) -> list[list[Document]]:
        try:
            return asyncio.run(_ask(client, [question.text for question in questions]))
        except SearchError as error:
            fix = "start it (bash retrieval_launch.sh) and name it by --retriever_url"
            raise ToolError(
                explain("--retriever_url", str(error), "a search server", fix)
            ) from error

    return find


async def _ask(client: RetrievalClient, texts: Sequence[str]) -> list[list[Document]]:
    found: list[list[Document]] = []
    async with client:
        await client.health()
        with progress("find documents", "questions", len(texts)) as report:
            for start in range(0, len(texts), AT_ONCE):
                some = texts[start : start + AT_ONCE]
                found += await asyncio.gather(*(client.search(text) for text in some))
                report(len(found))
    return found


def cache_finder(caches: Sequence[Path], corpus: Path, topk: int) -> Finder:
    """Reads the first `topk` hits of each question from caches, and the passages from their corpus.

    Raises DataError for an unusable file; the finder for questions that no cache has.
    """
    hits: dict[str, list[str]] = {}
    for cache in caches:
        hits |= {as_question(text): ids for text, ids in _read_cache(cache, topk)}
    documents = _read_documents(corpus, {i for ids in hits.values() for i in ids})

    def find(questions: Sequence[Question]) -> list[list[Document]]:
        missing = [question for question in questions if question.text not in hits]
        if missing:
            got = f"no hits for {len(missing)} of {len(questions)} questions: {missing[0].text!r}"
            fix = "give the caches of these splits, or a server by --retriever_url"
            names = ", ".join(map(str, caches))
            raise DataError(explain(names, got, "hits for every question", fix))
        return [[documents[i] for i in hits[q.text]] for q in questions]

    return find


def _read_cache(path: Path, topk: int) -> Iterator[tuple[str, list[str]]]:
    """Questions and the ids of their best passages."""
    try:
        content: Mapping[str, Any] = json.loads(regular(path).read_bytes())
        yield from (
            (text, [str(hit["id"]) for hit in hits[:topk]]) for text, hits in content.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        expected = '{"question": [{"id": "7"}, ...], ...}'
        raise DataError(explain(str(path), got, expected, "build the cache again")) from error


def _read_documents(path: Path, wanted: set[str]) -> dict[str, Document]:
    """The wanted passages of a corpus by id. Raises DataError where some are missing."""
    try:
        documents = {one.id: one for one in Corpus.open(path) if one.id in wanted}
    except SearchError as error:
        raise DataError(explain(str(path), str(error), "a corpus", "correct it")) from error
    missing = sorted(wanted - documents.keys())
    if missing:
        got = f"{len(missing)} ids of the caches are not in it, such as {missing[0]!r}"
        fix = "give the corpus that the caches were made of by --corpus_path"
        raise DataError(explain(str(path), got, "the caches' passages", fix))
    return documents
