"""The search page in headless Chromium with the real application on a real port."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from playwright import sync_api as playwright

from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.errors import Overloaded, QueryNotRecorded
from search_r1.retrieval.schema import Document, Hit
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.nightly.browser import tabs
from tests.nightly.browser.tabs import TIMEOUT_MS, chromium
from tests.retrieval.conftest import corpus_path as corpus_path
from tests.retrieval.conftest import open_engine as open_engine
from tests.retrieval.conftest import queries as queries
from tests.retrieval.conftest import serve as serve

pytestmark = pytest.mark.browser

HOSTILE = [
    Document.from_title("<b>1</b>", "<script>boom()</script>", "a <img src=x onerror=boom()> fish"),
    Document("2", "", "fishes, a fish & a Fish.\nNext line", "fish"),
    Document.from_title("3", "long", "word " * 600),
]
ERRORS = {"busy": Overloaded("the queue is full", 7.0), "unseen": QueryNotRecorded("no record")}


class ScriptedBackend:
    """A backend with hostile passages for `fish`, none for `void`, and errors for other words."""

    name = "scripted"
    num_threads = 1
    num_documents = 1234

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with stage("encode"):
            for query in queries:
                if query in ERRORS:
                    raise ERRORS[query]
        with stage("search"):
            hits = [Hit(document, 3.25 - i) for i, document in enumerate(HOSTILE)]
        return [[] if query == "void" else hits[:k] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"engine": "scripted", "index": {"kind": "<i>none</i>"}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Visit(tabs.Visit):
    """A browser tab with the search page."""

    def open(self, address: str = "/") -> None:
        self.tab.goto(self.url + address)
        self.tab.wait_for_selector("#server:not([data-state=waiting])")

    def search(self, query: str, topk: int | None = None) -> None:
        """Type a query and press Enter, as a person does."""
        self.tab.get_by_label("Question").fill(query)
        self.tab.get_by_label("Passages", exact=True).and_(self.tab.locator("input")).fill(
            "" if topk is None else str(topk)
        )
        self.tab.get_by_label("Question").press("Enter")

    def see(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until the only matching element shows the text."""
        playwright.expect(self.tab.locator(selector)).to_contain_text(text, timeout=TIMEOUT_MS)


@pytest.fixture
def visit(browser: Any, serve: Callable[..., Any]) -> Iterator[Callable[..., Visit]]:
    """A function that starts an application and opens a tab on it."""
    contexts, servers = [], []

    def visit_app(engine: Retriever | None = None, locale: str = "en-US", **settings: Any) -> Visit:
        server = serve(create_app(engine or ScriptedBackend(), **settings))
        url = server.__enter__()
        servers.append(server)
        contexts.append(browser.new_context(locale=locale))
        return Visit(contexts[-1].new_page(), url)

    yield visit_app
    for context in contexts:
        context.close()
    for server in servers:
        server.__exit__(None, None, None)


def test_the_page_shows_what_retrieve_returns(
    visit: Callable[..., Visit], open_engine: Callable[[str], Retriever]
) -> None:
    """Ids, titles, texts and scores equal those of POST /retrieve with the same topk."""
    page = visit(open_engine("bm25"))
    page.open()
    for query, topk in (("capital of France", 2), ("Danube river", None), ("Zürich 湖", 5)):
        page.search(query, topk)
        body = {"queries": [query], "topk": topk, "return_scores": True}
        [hits] = httpx.post(page.url + "/retrieve", json=body, trust_env=False).json()["result"]
        playwright.expect(page.tab).to_have_title(re.compile(re.escape(query)))
        page.see("#summary", f"{len(hits)} passage")
        assert page.texts(".id code") == [hit["document"]["id"] for hit in hits]
        assert page.texts(".passage h2") == [hit["document"]["title"] for hit in hits]
        assert page.texts(".passage .text") == [hit["document"]["text"] for hit in hits]
        assert page.texts(".score") == [f"score {hit['score']:.4f}" for hit in hits]
    assert page.complaints == []


def test_two_engines_and_a_question_set(
    visit: Callable[..., Visit], open_engine: Callable[[str], Retriever]
) -> None:
    """Another server's list stands beside; a pasted set is counted; a missed question is asked."""
    other = visit(open_engine("bm25"))
    page = visit(open_engine("bm25"), config=ServiceConfig(compare_with=(other.url,)))
    page.open("/?q=capital+of+France")
    page.see("#results .passage >> nth=0 >> .why", "france")
    page.tab.get_by_label("Beside").select_option(other.url)
    page.see("#other h2.engine", "3 in both lists")
    assert page.tab.locator(".passage.shared").count() == 6 and "beside=" in page.tab.url
    page.tab.locator("footer summary").first.click()
    page.tab.get_by_label("Pasted set").fill("capital of France\tSeine\nquokka\tan animal")
    page.tab.get_by_role("button", name="Count recall").click()
    page.see(".recalls tbody", "50.0 %")
    assert page.tab.locator(".recalls tbody tr").count() == 2
    page.tab.locator(".missed button").click()
    page.see("#summary", "No passage fits this question.")
    page.tab.get_by_label("Pasted set").fill("no tab")
    page.tab.get_by_role("button", name="Count recall").click()
    page.see("#problem", "line 1")


def test_timings_and_facts_are_shown(visit: Callable[..., Visit]) -> None:
    """The page shows stages of Server-Timing, round trip, cache hits, and facts of /info."""
    page = visit()
    page.open()
    page.see("#server", "scripted · 1,234 passages")
    page.search("fish")
    page.see("#stages", "round trip")
    stages = page.texts("#stages dt")
    assert {"queue", "encode", "search", "total", "network", "round trip"} <= set(stages)
    assert all(re.fullmatch(r"[\d.]+ ms", text) for text in page.texts("#stages dd"))
    page.tab.get_by_role("button", name="Search").click()
    page.see("#stages .badge", "hit")
    page.tab.locator("footer summary").last.click()
    facts = dict(zip(page.texts("#facts dt"), page.texts("#facts dd"), strict=True))
    assert (facts["engine"], facts["index · kind"]) == ("scripted", "<i>none</i>")
    assert page.complaints == []


def test_html_in_a_passage_is_text(visit: Callable[..., Visit]) -> None:
    """Scripts and images in titles, texts, ids or the query are shown as text."""
    page = visit()
    page.open("/?q=" + "fish %3Cimg src=x%3E")
    page.see(".passage >> nth=0", "<script>boom()</script>")
    page.see(".passage >> nth=0", "a <img src=x onerror=boom()> fish")
    assert page.texts(".id code")[0] == "<b>1</b>"
    assert page.tab.locator("#results script, #results img, #results b, #facts i").count() == 0
    assert page.texts(".passage >> nth=1 >> mark") == ["fish", "Fish"]
    page.tab.get_by_role("button", name="Show all").click()
    playwright.expect(page.tab.get_by_role("button", name="Show less")).to_be_visible()
    assert page.complaints == []


def test_empty_results_and_empty_questions(visit: Callable[..., Visit]) -> None:
    """An empty result is stated; an empty question sends nothing and clears the page."""
    page = visit()
    page.open()
    page.search("fish")
    page.see("#summary", "3 passages")
    page.search("void")
    page.see("#summary", "No passage fits")
    assert page.tab.locator(".passage").count() == 0
    page.search("  ")
    playwright.expect(page.tab.locator("#summary")).to_have_text("")
    assert page.complaints == []


@pytest.mark.parametrize(
    ("query", "topk", "words"),
    [
        ("busy", None, ["busy", "in 7 s", "the queue is full"]),
        ("unseen", None, ["cannot answer this question", "no record"]),
        ("x" * 201, None, ["does not accept this question", "at most 200"]),
        ("fish", 99, ["does not accept this question", "topk"]),
    ],
)
def test_errors_are_shown_in_words(
    visit: Callable[..., Visit], query: str, topk: int | None, words: list[str]
) -> None:
    """503, 424 and 422 show what happened and what is allowed; old passages disappear."""
    page = visit(config=ServiceConfig(max_query_chars=200, max_topk=10))
    page.open("/?q=fish")
    page.see("#summary", "3 passages")
    page.search(query, topk)
    for word in words:
        page.see("#problem", word)
    assert page.tab.locator(".passage").count() == 0
    page.search("fish")
    page.see("#summary", "3 passages")
    playwright.expect(page.tab.locator("#problem")).to_be_hidden()


def test_an_unreachable_server_is_shown(visit: Callable[..., Visit]) -> None:
    """Offline, the page shows an error; afterwards searching works again."""
    page = visit()
    page.open()
    page.tab.context.set_offline(True)
    page.search("fish")
    page.see("#problem", "cannot be reached")
    page.tab.context.set_offline(False)
    page.search("fish")
    page.see("#summary", "3 passages")


def test_a_token_is_asked_for_and_kept_in_memory(visit: Callable[..., Visit]) -> None:
    """401 shows a token field; a wrong token is reported; a right one works; none is stored."""
    page = visit(token="s3cret")
    page.open("/?q=fish")
    field = page.tab.get_by_label("Access token")
    playwright.expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    page.see("#problem", "does not accept this token")
    field.fill("s3cret")
    field.press("Enter")
    page.see("#summary", "3 passages")
    page.see("#server", "1,234 passages")
    playwright.expect(field).to_be_hidden()
    stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location])"
    assert "s3cret" not in page.tab.evaluate(stored)


def test_a_link_holds_the_question(visit: Callable[..., Visit]) -> None:
    """`/?q=` searches at once; searching changes the address; back restores the question."""
    page = visit()
    page.open("/?q=fish&topk=1")
    page.see("#summary", "1 passage in")
    page.search("void")
    page.see("#summary", "No passage")
    assert page.tab.url.endswith("?q=void")
    page.tab.go_back()
    page.see("#summary", "1 passage in")
    assert page.tab.get_by_label("Question").input_value() == "fish"
    assert page.complaints == []


def test_keyboard_and_phone(visit: Callable[..., Visit]) -> None:
    """`/` focuses the question; every field has a label; the page fits a phone."""
    page = visit()
    page.tab.set_viewport_size({"width": 360, "height": 700})
    page.open("/?q=fish")
    page.see("#summary", "3 passages")
    page.tab.get_by_role("button", name="Search").focus()
    page.tab.keyboard.press("/")
    playwright.expect(page.tab.get_by_label("Question")).to_be_focused()
    labels = "[...document.querySelectorAll('input')].every((input) => input.labels.length === 1)"
    assert page.tab.evaluate(labels)
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_speaks_chinese(visit: Callable[..., Visit]) -> None:
    """By the browser's language, until another one is chosen; Chinese words are marked."""
    page = visit(locale="zh-CN")
    page.open()
    page.see("#go", "搜索")
    page.see("#server", "1,234 个段落")
    page.tab.get_by_label("问题").fill("void 的鱼")
    page.tab.get_by_label("问题").press("Enter")
    page.see("#summary", "3 个段落，用时")
    page.see("#stages", "往返")
    page.tab.locator("#language").click()
    page.see("#go", "Search")
    page.see("#summary", "3 passages in")
    assert page.tab.locator("html").get_attribute("lang") == "en"
    assert page.complaints == []
