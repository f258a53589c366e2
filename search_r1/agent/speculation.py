"""Searches sent ahead of the policy, and answers used only for a query that is exactly equal.

While a turn is sampled, the query that it has written to its last word is asked for, at the start
of a dialogue the question itself; what a sibling of the same group asked is not asked again. A
prediction that fails, or is not what the policy asks in the end, leaves nothing behind: the
ordinary search runs as it would have.
"""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from search_r1.search.client import RetrievalClient
from search_r1.search.schema import Document

SENT, USED, SHARED = "searches_ahead", "searches_ahead_used", "searches_shared"
"""Predictions that were sent; those that somebody wanted; searches that a sibling had begun."""
MOST_OPEN = 4
"""Predictions of one dialogue that may be unanswered at a time; further ones are not sent."""

NUM_QUESTIONS, EVERY = 32, 16
"""When none of so many questions was wanted, only every so many-th is asked ahead."""


@dataclass(eq=False)
class Asked:
    """One search under way or answered; times are of `time.monotonic`."""

    documents: asyncio.Future[list[Document]]
    dialogue: object
    """Stands for the one that asked first."""
    is_unwanted: bool
    """A prediction that no policy has asked for so far."""
    sent: float = field(default_factory=time.monotonic)
    answered: float | None = None


class Group:
    """What the dialogues of one group asked and found, while one of them goes on."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}

    def add(self, query: str, asked: Asked) -> None:
        """Note a search that begins now; one that fails is forgotten."""
        self.asked[query] = asked

        def ended(documents: asyncio.Future[list[Document]]) -> None:
            asked.answered = time.monotonic()
            if documents.cancelled() or documents.exception() is not None:
                self.asked.pop(query, None)

        asked.documents.add_done_callback(ended)


class Foresight:
    """One dialogue's searches: it asks ahead, and finds what was asked before."""

    def __init__(self, client: RetrievalClient, group: Group) -> None:
        self.client, self.group, self.dialogue = client, group, object()
        self.open: set[asyncio.Task[list[Document]]] = set()
        self.counts: Counter[str] = Counter()
        self.waited = self.hidden = 0.0

    def predict(self, query: str) -> Asked | None:
        """Ask for what may be wanted, unless that was asked before or would be in the way."""
        if not query.strip() or query in self.group.asked:
            return None
        if len(self.open) >= MOST_OPEN or not self.client.has_room_ahead:
            return None
        task = asyncio.ensure_future(self.client.search_ahead(query))
        self.open.add(task)
        task.add_done_callback(self.open.discard)
        asked = Asked(task, self.dialogue, is_unwanted=True)
        self.group.add(query, asked)
        self.counts[SENT] += 1
        return asked

    async def search(self, query: str) -> list[Document]:
        """The documents for what the policy asks; raises as `RetrievalClient.search` does."""
        began = time.monotonic()
        asked = self.group.asked.get(query)
        try:
            if asked is not None:
                await asyncio.wait([asked.documents])
                if asked.documents.cancelled() or asked.documents.exception() is not None:
                    asked = None
            if asked is None:
                return await self._ordinary(query, began)
        finally:
            self.waited += time.monotonic() - began
        assert asked.answered is not None
        self.hidden += max(0.0, min(began, asked.answered) - asked.sent)
        self.counts.update({USED: asked.is_unwanted, SHARED: asked.dialogue is not self.dialogue})
        asked.is_unwanted = False
        return asked.documents.result()

    def stats(self) -> dict[str, float]:
        """Seconds that the dialogue waited for searches and was spared, and counts."""
        counts = {name: float(self.counts[name]) for name in (SENT, USED, SHARED)}
        return {"search_wait_s": self.waited, "search_wait_hidden_s": self.hidden, **counts}

    async def _ordinary(self, query: str, began: float) -> list[Document]:
        """The search as it is without foresight; siblings that ask the same wait for it too."""
        documents: asyncio.Future[list[Document]] = asyncio.get_running_loop().create_future()
        if query not in self.group.asked:
            self.group.add(query, Asked(documents, self.dialogue, is_unwanted=False))
        try:
            found = await self.client.search(query, began)
        except BaseException:
            documents.cancel()
            raise
        documents.set_result(found)
        return found


class Questions:
    """Predicts that a dialogue asks its question; rarely, once that has long been wrong."""

    def __init__(self) -> None:
        self.judged: deque[Asked] = deque(maxlen=NUM_QUESTIONS)
        self.num_left_out = 0

    def predict(self, foresight: Foresight, question: str) -> Asked | None:
        """Ask for the question, unless policies ask otherwise."""
        is_vain = len(self.judged) == NUM_QUESTIONS and all(a.is_unwanted for a in self.judged)
        if is_vain and self.num_left_out < EVERY - 1:
            self.num_left_out += question not in foresight.group.asked
            return None
        self.num_left_out = 0
        return foresight.predict(question)

    def judge(self, asked: Asked | None) -> None:
        """The dialogue that `predict` gave this for is over."""
        if asked is not None:
            self.judged.append(asked)
