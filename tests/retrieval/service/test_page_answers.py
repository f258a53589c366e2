"""The search page's own routes: examples, parts of scores, other engines and servers, recall."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from example import geography
from search_r1.agent.search import holds_answer
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.schema import Document
from search_r1.retrieval.server import create_app
from search_r1.retrieval.service.page_answers import CUTOFFS, question_about
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig, ServiceConfig
from tests.apps import running

QUESTIONS = [
    ("calling code of Norway", ["47"]),
    ("area of Austria", ["nothing", "83858"]),
    ("Where do unicorns live?", ["Atlantis"]),
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """BM25 and a bag of words over the example world."""
    pytest.importorskip("faiss")
    folder, corpus = str(tmp_path_factory.mktemp("index")), str(geography.CORPUS)
    build_index(BuildConfig("bm25+bag", corpus, folder, "hash:64"))
    encoder = EncoderConfig("hash:64")
    return build_retriever(RetrieverConfig("bm25+bag", corpus, folder, encoder=encoder))


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(hybrid: Any) -> Iterator[Ask]:
    """Ask the page's questions of the hybrid, which shows its BM25 on another server beside it."""
    with ExitStack() as stack:
        other = stack.enter_context(running(create_app(hybrid.parts["bm25"])))
        config = ServiceConfig(max_topk=10, compare_with=(other,))
        url = stack.enter_context(running(create_app(hybrid, config)))

        def asked(path: str, status: int = 200, **body: Any) -> Any:
            answer = httpx.post(f"{url}/{path}", json=body, trust_env=False)
            assert answer.status_code == status, answer.text
            return answer.json()

        yield asked


def test_the_first_screen_asks_what_the_corpus_answers(ask: Ask, hybrid: Any) -> None:
    """Each is a question whose passage is among the first; what stands beside is named."""
    start = ask("page/start")
    assert len(set(start["examples"])) == 4 and start["beside"][:2] == ["bm25", "bag"]
    for query in start["examples"]:
        assert query.endswith("?")
        [hits] = hybrid.search([query], 3)
        assert query in {question_about(hit.document) for hit in hits}


@pytest.mark.parametrize(("text", "question"), [
    ("The area of Oslo is 454 square km.", "What is the area of Oslo?"),
    ("The Beatles were an English band.", "What were the Beatles?"),
    ("挪威的首都是奥斯陆。它", "挪威的首都是什么？"),
    ("Oslo (Norway) is large.", "A title"),
])  # fmt: skip
def test_questions_are_made_of_first_sentences(text: str, question: str) -> None:
    """Where a sentence has another form, the title is offered; without one, nothing is."""
    assert question_about(Document.from_title("1", "A title", text)) == question
    assert question_about(Document("1", "", "x", "x")) is None


@pytest.mark.parametrize("name", ["bm25+bag", "bm25"])
def test_the_parts_of_each_score_add_up_to_it(ask: Ask, hybrid: Any, name: str) -> None:
    """Of BM25 the parts are words of the query, of a hybrid its engines; for each hit, in order."""
    engine = hybrid if name == "bm25+bag" else hybrid.parts["bm25"]
    for query in ("calling code of Norway", "code code Norway Norway", "zebra", "the of"):
        [hits] = engine.search([query], 5)
        parts = engine.explain(query, 5)
        assert [sum(part.values()) for part in parts] == pytest.approx([h.score for h in hits])
        names = {key for part in parts for key in part}
        assert names <= (set(hybrid.parts) if engine is hybrid else set(query.lower().split()))
    shown = ask("page/why", query="calling code of Norway", topk=5)["parts"]
    expected = hybrid.explain("calling code of Norway", 5)
    assert [dict(part) for part in shown] == expected
    assert ask("page/why", 422, query="x", topk=11)["detail"].startswith("topk is 11")


def test_other_engines_and_servers_are_asked(ask: Ask, hybrid: Any) -> None:
    """A part of the hybrid and the server with the same engine find the same documents."""
    other = ask("page/start")["beside"][2]
    [hits] = hybrid.parts["bm25"].search(["calling code of Norway"], 4)
    for name in ("bm25", other):
        found = ask("page/beside", query="calling code of Norway", topk=4, beside=name)
        assert [d["id"] for d in found["documents"]] == [hit.document.id for hit in hits]
    unknown = ask("page/beside", 422, query="x", topk=1, beside="http://elsewhere:1")
    assert "--compare_with" in unknown["detail"]
    assert ask("page/nothing", 404)


@pytest.mark.parametrize("is_json", [True, False])
def test_recall_is_that_of_the_evaluation_rule(ask: Ask, hybrid: Any, is_json: bool) -> None:
    """It counts questions with an answer in the first k documents, as `holds_answer` does."""
    rows = [json.dumps({"question": q, "golden_answers": a}) if is_json else "\t".join([q, *a])
            for q, a in QUESTIONS]  # fmt: skip
    told = ask("page/recall", text="\n\n".join(rows), beside="bag")
    assert told["questions"] == 3 and told["missed"] == ["Where do unicorns live?"]
    for column, engine in zip(told["columns"], (hybrid, hybrid.parts["bag"]), strict=True):
        results = engine.search([question for question, _ in QUESTIONS], 10)
        for k in CUTOFFS:
            found = [holds_answer([hit.document for hit in hits[:k]], accepted)
                     for hits, (_, accepted) in zip(results, QUESTIONS, strict=True)]  # fmt: skip
            assert column["found"][str(k)] == sum(found)


@pytest.mark.parametrize("text", ["", "no answer", '{"question": "q"}', "{", '{"question": "q", '
                                  '"answers": [1]}', "q\ta\n" * 2001])  # fmt: skip
def test_a_set_that_cannot_be_read_is_refused(ask: Ask, text: str) -> None:
    """With the line and what is expected there."""
    assert "expected" in ask("page/recall", 422, text=text)["detail"]


def test_an_engine_without_corpus_or_parts_has_neither(hybrid: Any) -> None:
    """Then no examples are offered, and a score is one number."""

    class Bare:
        name, num_threads, num_documents = "bare", 1, 0

        def search(self, queries: list[str], k: int) -> list[list[Any]]:
            return [[] for _ in queries]

        def info(self) -> dict[str, Any]:
            return {}

    with running(create_app(Bare())) as url:
        post = {"trust_env": False}
        start = httpx.get(f"{url}/page/start", **post).json()  # type: ignore[arg-type]
        assert start == {"examples": [], "beside": []}
        why = httpx.post(f"{url}/page/why", json={"query": "q", "topk": 3}, trust_env=False)
        assert why.json() == {"parts": None}
    assert isinstance(hybrid.corpus, Corpus)
