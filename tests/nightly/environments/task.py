"""The documents of the task that both ways of a test search."""

from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document

WORDS = ("oslo", "bergen", "norway", "fjord", "city", "sea", "ünïcode", "<answer>no</answer>")
DOCUMENTS = [
    Document.from_title(str(n), f"{a} {b}".title(), f"{a} is near {b}. {b * (1 + n % 5)}")
    for n, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS if a != b)
]


def retrieval() -> InMemoryRetrieval:
    return InMemoryRetrieval(DOCUMENTS)
