"""Speculative searches: sent before the policy asks, and used only for exactly equal queries.

While a turn is being sampled, the query as written up to its last complete word is sent; at the
start of a dialogue, the question itself. A search that another dialogue of the same group already
sent is reused. A prediction that fails, or that the policy does not ask for in the end, has no
effect on the dialogue: the policy's query is then searched for as without speculation.
"""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from search_r1.search.client import RetrievalClient
from search_r1.search.schema import Document

SENT, USED, SHARED = "searches_ahead", "searches_ahead_used", "searches_shared"
"""Statistics: predictions sent, predictions used, searches first sent by another dialogue."""
MAX_OPEN = 4
"""Maximum number of unanswered predictions per dialogue; further predictions are not sent."""

OUTCOME_WINDOW, RETRY_EVERY = 32, 16
"""After `OUTCOME_WINDOW` unused predictions of the question in a row, only every `RETRY_EVERY`-th
question is predicted."""


@dataclass(eq=False)
class TrackedSearch:
    """A search that is in progress or answered; times are from `time.monotonic`."""

    documents: asyncio.Future[list[Document]]
    dialogue: object
    """Identity of the dialogue that sent it."""
    is_unused_prediction: bool
    """Whether it was predicted and no policy has asked for it yet."""
    sent_at: float = field(default_factory=time.monotonic)
    answered_at: float | None = None


class GroupSearches:
    """Searches of one group's dialogues by query; it lives as long as one of the dialogues."""

    def __init__(self) -> None:
        self.by_query: dict[str, TrackedSearch] = {}

    def add(self, query: str, search: TrackedSearch) -> None:
        """Track a search that starts now; it is removed again if it fails."""
        self.by_query[query] = search

        def finish(documents: asyncio.Future[list[Document]]) -> None:
            search.answered_at = time.monotonic()
            if has_failed(documents):
                self.by_query.pop(query, None)

        search.documents.add_done_callback(finish)


def has_failed(documents: asyncio.Future[list[Document]]) -> bool:
    return documents.cancelled() or documents.exception() is not None


class SpeculativeRetrieval:
    """The retrieval of one dialogue: sends predicted searches and reuses earlier ones."""

    def __init__(self, client: RetrievalClient, group: GroupSearches) -> None:
        self.client, self.group, self.dialogue = client, group, object()
        self.open: set[asyncio.Task[list[Document]]] = set()
        self.counts: Counter[str] = Counter()
        self.wait_s = self.hidden_s = 0.0

    def predict(self, query: str) -> TrackedSearch | None:
        """Send a search that the policy may ask for; None if it is known or would delay others."""
        if not query.strip() or query in self.group.by_query:
            return None
        if len(self.open) >= MAX_OPEN or not self.client.can_prefetch:
            return None
        task = asyncio.ensure_future(self.client.prefetch(query))
        self.open.add(task)
        task.add_done_callback(self.open.discard)
        search = TrackedSearch(task, self.dialogue, is_unused_prediction=True)
        self.group.add(query, search)
        self.counts[SENT] += 1
        return search

    async def search(self, query: str) -> list[Document]:
        """Return the documents for the policy's query; raises as `RetrievalClient.search` does."""
        start = time.monotonic()
        search = self.group.by_query.get(query)
        try:
            if search is not None:
                await asyncio.wait([search.documents])
            if search is None or has_failed(search.documents):
                return await self._search_now(query, start)
        finally:
            self.wait_s += time.monotonic() - start
        assert search.answered_at is not None
        self.hidden_s += max(0.0, min(start, search.answered_at) - search.sent_at)
        self.counts[USED] += search.is_unused_prediction
        self.counts[SHARED] += search.dialogue is not self.dialogue
        search.is_unused_prediction = False
        return search.documents.result()

    def stats(self) -> dict[str, float]:
        """Return the seconds of search time waited for and hidden, and the counts."""
        counts = {name: float(self.counts[name]) for name in (SENT, USED, SHARED)}
        return {"search_wait_s": self.wait_s, "search_wait_hidden_s": self.hidden_s, **counts}

    async def _search_now(self, query: str, start: float) -> list[Document]:
        """Search without speculation; dialogues of the group with the same query share it."""
        future: asyncio.Future[list[Document]] = asyncio.get_running_loop().create_future()
        if query not in self.group.by_query:
            search = TrackedSearch(future, self.dialogue, is_unused_prediction=False)
            self.group.add(query, search)
        try:
            documents = await self.client.search(query, start)
        except BaseException:
            future.cancel()
            raise
        future.set_result(documents)
        return documents


class QuestionPredictor:
    """Predicts that a dialogue searches for its question, and rarely so once that keeps failing."""

    def __init__(self) -> None:
        self.outcomes: deque[TrackedSearch] = deque(maxlen=OUTCOME_WINDOW)
        self.num_skipped = 0

    def predict(self, retrieval: SpeculativeRetrieval, question: str) -> TrackedSearch | None:
        """Send a search for the question, unless recent dialogues did not search for theirs."""
        num_unused = sum(search.is_unused_prediction for search in self.outcomes)
        if num_unused == OUTCOME_WINDOW and self.num_skipped < RETRY_EVERY - 1:
            self.num_skipped += question not in retrieval.group.by_query
            return None
        self.num_skipped = 0
        return retrieval.predict(question)

    def record(self, prediction: TrackedSearch | None) -> None:
        """Record the outcome of a prediction once its dialogue has ended."""
        if prediction is not None:
            self.outcomes.append(prediction)
