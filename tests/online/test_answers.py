"""A budget over a served engine, and the services' own answers: answer boxes, knowledge graphs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from search_r1.online.engine import OnlineRetriever
from search_r1.online.ledger import BudgetSpent
from search_r1.retrieval.errors import REQUEST_LEVEL_STATUSES, SetupError
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.server import create_app
from tests.apps import running

Open = Callable[..., OnlineRetriever]
RESULTS = [(f"https://example.org/river/{i}", f"River {i}", f"About {i}.") for i in range(2)]


@pytest.fixture
def start(web: Any, documented: Any, open_at: Open) -> Callable[..., tuple[Any, Open]]:
    """Return a function that starts a fake service with fields besides its results."""

    def begin(**fields: Any) -> tuple[Any, Open]:
        reply = type(documented.rate_limited)
        server = web(lambda _: reply(documented.answer(RESULTS) | fields))
        return server, partial(open_at, server)

    return begin


@pytest.mark.parametrize("name", ["serper"])
def test_a_budget_ends_requests_but_not_cached_answers(start: Any, tmp_path: Path) -> None:
    """Over restarts; then the server answers 402, which no client repeats query by query."""
    server, open_engine = start()
    options = {"online_budget": 0.02, "online_price": 0.01, "online_ledger": str(tmp_path / "l")}
    engine = open_engine(**options)
    found = [engine.search([query], 1) for query in ("river", "lake")]
    for reopened in (engine, open_engine(**options)):
        with pytest.raises(BudgetSpent, match=r"0.02 spent in 2 requests at 0.01"):
            reopened.search(["pond"], 1)
    assert [engine.search([query], 1) for query in ("river", "lake")] == found
    assert len(server.requests) == 2
    with running(create_app(engine)) as url:
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["pond"]}, trust_env=False)
    assert answer.status_code == 402
    assert answer.status_code in REQUEST_LEVEL_STATUSES


BOXES: dict[str, tuple[dict[str, Any], list[tuple[str, str, str]]]] = {
    "serpapi": (
        {
            "answer_box": {"title": "T", "answer": "Paris", "link": "https://a.org"},
            "knowledge_graph": {"title": "France", "description": "A country."},
        },
        [("answer_box:https://a.org", "T", "Paris"), ("knowledge_graph", "France", "A country.")],
    ),
    "serper": (
        {"answerBox": {"title": "T", "snippet": "Paris is", "link": "https://a.org"}},
        [("answerBox:https://a.org", "T", "Paris is")],
    ),
    "tavily": ({"answer": "Paris."}, [("answer", "", "Paris.")]),
}


def test_answer_boxes_come_first(start: Any, name: str) -> None:
    """The service's own answers, if asked for; a service without any refuses."""
    body, expected = BOXES.get(name, ({}, []))
    server, open_engine = start(**body)
    if not expected:
        with pytest.raises(SetupError, match="--answer_boxes"):
            open_engine(answer_boxes=True)
        return
    engine, plain = open_engine(answer_boxes=True), open_engine()
    hits = engine.search(["river"], 3)[0]
    documents = [(hit.document.id, hit.document.title, hit.document.text) for hit in hits]
    assert documents[: len(expected)] == expected
    assert len(hits) == 3 and hits[-1].document.id.startswith("https://example.org/river")
    assert len(plain.search(["river"], 3)[0]) == 2
    if name == "tavily":
        assert [request.body.get("include_answer") for request in server.requests] == [True, None]
    assert fingerprint(plain.info()) != fingerprint(engine.info())


@pytest.mark.parametrize("name", ["serpapi"])
@pytest.mark.parametrize(
    ("box", "text"),
    [({"result": 4}, "4"), ({"list": ["a", "b"]}, "a; b"), ({"snippet": "s", "list": [1]}, "s"),
     ({"temperature": 3}, None)],
)  # fmt: skip
def test_boxes_of_other_kinds(start: Any, box: Any, text: str | None) -> None:
    """Numbers and lists are text; a box without any is left out."""
    _, open_engine = start(answer_box=box)
    hits = open_engine(answer_boxes=True).search(["river"], 3)[0]
    assert [hit.document.text for hit in hits][:-2] == ([text] if text else [])
