"""The tool `search`: documents from a retrieval server, if asked so ahead of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from search_r1 import loops
from search_r1.agent.retriever import (
    PROBE_S,
    QUERY,
    RetrieverTool,
    build_client,
    failure,
    given_retrieval,
)
from search_r1.agent.speculation import Foresight, Group, Questions
from search_r1.search.backends.base import fingerprint
from search_r1.search.client import RETRIED, EmptyRetrieval, Retrieval, RetrievalClient, counting
from search_r1.search.errors import SearchError
from verl.agent.interface import Item, Observation, text_arguments
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.types import Trajectory

FAILED = "searches_failed"
"""Searches that were not answered, after all retries."""
SERVICE = {"retriever", "num_documents", "default_topk", "fingerprint", "limits", "memory",
           "corpus", "encoder"}  # fmt: skip
"""Of `/info`, what is not the engine with its index."""


class SearchTool(RetrieverTool):
    """Searches a collection of documents."""

    name = "search"
    description = "Searches a collection of documents and gives the best passages for a query."
    parameters = text_arguments(query="What to look for.")
    counted_as = "searches"
    faults = (RETRIED, FAILED)

    def __init__(self, retrieval: Retrieval, options: ServerConfig | None = None) -> None:
        """`retrieval` finds the documents; `options` say where it is, for probes and messages."""
        super().__init__(options)
        self.retrieval = retrieval
        self._groups: WeakValueDictionary[str, Group] = WeakValueDictionary()
        self._questions = Questions()

    def for_dialogue(self, start: Trajectory) -> SearchTool:
        """With `retriever.speculate`, one that asks ahead, beginning with the question."""
        if not (self.options.speculate and isinstance(self.retrieval, RetrievalClient)):
            return self
        group = self._groups.setdefault(start.group, Group()) if start.group else Group()
        question = str(start.prompt.extra_info.get("question") or "")
        foresight = Foresight(self.retrieval, group)
        return ForeseeingSearch(foresight, self.options, self._questions, question)

    async def call(self, *, query: str) -> Observation:  # type: ignore[override]
        """The documents for one query, best first. Raises ToolError when the search fails."""
        with counting() as faults:
            try:
                documents = await self.retrieval.search(query)
            except SearchError as error:
                raise failure(error, {**faults, FAILED: 1}) from error
        items = tuple(Item(one.text, one.title, one.id, one) for one in documents)
        return Observation(items, dict(faults))

    async def try_out(self, client: RetrievalClient) -> None:
        """A search with the run's own token and topk."""
        await client.search(QUERY)

    def identity(self) -> Mapping[str, str]:
        """Fingerprints of corpus, index and encoder, as far as the server tells them."""
        if self.options.url == EMPTY_URL:
            return {}
        return retriever_identity(self.options.url, min(self.options.timeout, PROBE_S))

    def settings(self) -> Mapping[str, Any]:
        return {"topk": self.options.topk}

    async def aclose(self) -> None:
        if isinstance(self.retrieval, RetrievalClient):
            await self.retrieval.aclose()


class ForeseeingSearch(SearchTool):
    """The tool as one dialogue has it: what it seems to be about to ask is asked ahead."""

    anticipates = True
    retrieval: Foresight

    def __init__(
        self, foresight: Foresight, options: ServerConfig, questions: Questions, question: str
    ) -> None:
        """Asks for `question` at once."""
        super().__init__(foresight, options)
        self._questions = questions
        self._question = questions.predict(foresight, question)

    def anticipate(self, *, query: str) -> None:  # type: ignore[override]
        self.retrieval.predict(query)

    def ended(self) -> Mapping[str, float]:
        """What was waited for, and what was asked ahead."""
        self._questions.judge(self._question)
        return self.retrieval.stats()


def build_search(config: Config) -> SearchTool:
    """The tool of a run: over its server, over what was given from Python, or none (`empty`)."""
    options = config.retriever
    own = given_retrieval(config)
    if own is not None:  # there is no server to be asked how it is
        return SearchTool(own, replace(options, url=EMPTY_URL))
    is_empty = options.url == EMPTY_URL
    return SearchTool(EmptyRetrieval() if is_empty else build_client(options), options)


def retriever_identity(url: str | Sequence[str], timeout: float) -> dict[str, str]:
    """Fingerprints of `corpus`, `index` (engine and its settings) and `encoder`, as far as known.

    A server without `/info` in this form, such as the original's, has none. `timeout` in seconds.
    """

    async def ask() -> dict[str, Any]:
        async with RetrievalClient(url, timeout=timeout, max_retries=1, deadline=timeout) as client:
            return await client.info()

    try:
        return identity_of(loops.run(ask()))
    except SearchError:
        return {}


def identity_of(info: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints in an answer to `/info`."""
    parts = {name: info[name] for name in ("corpus", "encoder") if isinstance(info.get(name), dict)}
    engine = {name: value for name, value in info.items() if name not in SERVICE}
    if engine:
        parts["index"] = engine
    return {name: fingerprint(facts) for name, facts in parts.items()}
