"""The chat page in real headless Chromium, against a scripted agent on a real port."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as playwright

from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from tests.agent_server.services import MODEL, serving
from tests.agent_server.test_app import prompt_of
from tests.fakes import ScriptedEngine
from tests.inference.scripted import SHORT, TWO_SEARCHES, SpellingEngine, session
from tests.nightly.browser.paced import PacedEngine
from tests.nightly.browser.tabs import TIMEOUT_MS, Visit, chromium
from verl.errors import AnswerInvalid
from verl.types import Completion, Sampling

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=boom()><script>boom()</script>"
CAPITAL = "What is the capital of Norway?"


class BrokenEngine(SpellingEngine):
    """Fails in the middle of an answer."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Callable[[str], None]
    ) -> Completion:
        listener("<think> Let me ")
        raise AnswerInvalid(f"the endpoint sent {HOSTILE}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Return a function that opens a new tab in a separate browser context."""
    contexts = []

    def open_tab(url: str, **settings: Any) -> Visit:
        contexts.append(browser.new_context(**{"locale": "en-US"} | settings))
        page = Visit(contexts[-1].new_page(), url + "/")
        page.open()
        return page

    yield open_tab
    for context in contexts:
        context.close()


def ask(page: Visit, question: str) -> None:
    """Type the question and press Enter."""
    page.tab.keyboard.type(question)
    page.tab.keyboard.press("Enter")


def test_an_answer_is_watched_and_its_sources_are_read(visit: Callable[..., Visit]) -> None:
    """Using only the keyboard: reasoning, searches and answer, then a source and a follow-up."""
    engine = PacedEngine([*TWO_SEARCHES, "<answer> Stockholm </answer>"])
    with serving(session(engine)) as url:
        page = visit(url)
        page.see("#state", f"ready: {MODEL}")
        page.tab.keyboard.press("Enter")
        ask(page, CAPITAL)
        page.see(".thought", "Where?")
        page.see("#state", "answering")
        assert page.texts(".search, .answer, .end") == []
        engine.turns.release()
        page.see(".search", "capital of Norway")
        assert page.texts(".search summary") == ["Oslo", "Norway"]
        engine.turns.release()
        page.see(".thought >> nth=2", "So it is.")
        assert page.texts(".answer") == []
        engine.turns.release()
        page.see(".answer", "Oslo")
        page.see(".end", f"searches: 2 · tokens written: {len(''.join(TWO_SEARCHES))} · seconds: ")
        assert page.texts(".exchange > *:not(.end)") == [
            CAPITAL, "Where?", page.texts(".search")[0], "Sure?", page.texts(".search")[1],
            "So it is.", "Oslo", "SourcesOsloNorway",
        ]  # fmt: skip
        norway = page.tab.get_by_role("button", name="Norway", exact=True)
        norway.focus()
        page.tab.keyboard.press("Enter")
        found = page.tab.locator("details[open]")
        playwright.expect(found.locator("summary")).to_be_focused()
        assert found.locator("p").first.is_visible()
        assert page.texts("details[open] p") == ["Norway lies in Europe.", "id 7"]
        page.tab.keyboard.press("/")
        engine.turns.release()
        ask(page, "And Sweden?")
        page.see(".exchange >> nth=1 >> .answer", "Stockholm")
    asked = engine.tokenizer.decode(engine.requests[3].prompt_ids[:-1])
    assert asked == f"{CAPITAL}\nOslo\n{SHORT.user_prompt('And Sweden?')}"
    assert page.complaints == []


def test_hostile_words_stay_words(visit: Callable[..., Visit]) -> None:
    """HTML in the policy's text, query, answer or in a document is shown as text."""
    bad = Document.from_title(HOSTILE, HOSTILE, HOSTILE + "\u202e")
    script = [f"{HOSTILE} <search> {HOSTILE} </search>", f"<answer> {HOSTILE} </answer>"]
    retrieval = InMemoryRetrieval({HOSTILE: [bad]})
    with serving(session(SpellingEngine(script), retrieval)) as url:
        page = visit(url)
        loaded: list[str] = []
        page.tab.on("request", lambda request: loaded.append(request.url))
        ask(page, HOSTILE)
        page.see(".end", "searches: 1")
        page.tab.locator(".sources button").click()
        shown = page.texts("h2, .thought, .search strong, details > *, .answer, .sources button")
        assert shown == [*[HOSTILE] * 4, HOSTILE + "\\u202e", f"id {HOSTILE}", HOSTILE, HOSTILE]
        assert page.tab.locator("#talk :is(img, script)").count() == 0
        assert loaded == [f"{url}/v1/chat/completions"] and page.tab.title() != "boom"
    assert page.complaints == []


def test_a_token_is_asked_for_and_kept_in_the_tab(visit: Callable[..., Visit]) -> None:
    """A wrong token is asked for again; a reload remembers it; no URL contains it."""
    with serving(session(ScriptedEngine(TWO_SEARCHES)), token="secret") as url:
        page = visit(url)
        urls: list[str] = []
        page.tab.on("request", lambda request: urls.append(request.url))
        for token in ("wrong", "secret"):
            page.see("#state", "a token is needed")
            page.tab.get_by_label("Access token").fill(token)
            page.tab.keyboard.press("Enter")
        page.see("#state", "ready")
        page.open()
        page.see("#state", "ready")
        assert page.tab.locator("#access").is_hidden()
        ask(page, CAPITAL)
        page.see(".answer", "Oslo")
        assert not any("secret" in url for url in urls)


def test_stops_errors_and_ends_are_told(visit: Callable[..., Visit]) -> None:
    """Stopping cancels the engine's turn, and the next prompt does not contain that question."""
    engine = PacedEngine(["<think> Hm", "<think> Hm </think>"])
    with serving(session(engine, max_turns=0)) as url:
        page = visit(url)
        ask(page, CAPITAL)
        page.see(".thought", "Hm")
        page.tab.keyboard.press("Escape")
        page.see(".end", "Stopped")
        page.see("#state", "ready")
        assert engine.was_cancelled.wait(TIMEOUT_MS / 1000)
        engine.turns.release()
        ask(page, "Again?")
        page.see(".notice.warn", "No answer: all turns are used up.")
        assert prompt_of(ScriptedEngine([], requests=engine.requests[1:])) == SHORT.user_prompt(
            "Again?"
        )
        page.tab.get_by_role("button", name="New conversation").click()
        assert page.texts(".exchange") == []
    with serving(session(BrokenEngine([]))) as url:
        page = visit(url)
        ask(page, CAPITAL)
        page.see(".notice.bad", f"the endpoint sent {HOSTILE}")
    ask(page, CAPITAL)
    page.see(".exchange >> nth=1 >> .notice.bad", "The server cannot be reached")
    page.see("#state", "no answer")


def test_a_conversation_that_is_too_long_loses_its_beginning(visit: Callable[..., Visit]) -> None:
    """The oldest question is dropped with a note if the prompt would be too long."""
    engine = SpellingEngine([f"<answer> {n} </answer>" for n in range(3)])
    limit = len(SHORT.user_prompt("2?")) + len("0?\n0\n") + 1
    with serving(session(engine, limit=limit)) as url:
        page = visit(url)
        for n in range(3):
            ask(page, f"{n}?")
            page.see(f".exchange >> nth={n} >> .answer", str(n))
        assert ["left out" in text for text in page.texts(".exchange")] == [False, False, True]
    asked = engine.tokenizer.decode(engine.requests[2].prompt_ids[:-1])
    assert asked == f"1?\n1\n{SHORT.user_prompt('2?')}"


def test_another_server_of_ours_is_asked(visit: Callable[..., Visit]) -> None:
    """Servers that name each other as peers can be chosen; a token is sent to its server only."""
    with serving(session(ScriptedEngine([]))) as here:
        port = int(here.rpartition(":")[2])  # reused below, since the peer must know it beforehand
    with (
        serving(session(SpellingEngine(TWO_SEARCHES)), peers=(here,)) as there,
        serving(session(ScriptedEngine([])), token="secret", peers=(there,), port=port) as url,
    ):
        page = visit(url)
        page.tab.get_by_label("Access token").fill("secret")
        page.tab.keyboard.press("Enter")
        page.see("#state", "ready")
        sent: list[Any] = []
        page.tab.on("request", lambda request: sent.append(request))
        page.tab.get_by_label("Server").select_option(there)
        page.see("#state", "ready")
        page.tab.locator("#question").focus()
        ask(page, CAPITAL)
        page.see(".answer", "Oslo")
        assert {request.url for request in sent} == {
            f"{there}/v1/models",
            f"{there}/v1/examples",
            f"{there}/v1/chat/completions",
        }
        assert not any("secret" in str(request.all_headers()) for request in sent)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
def test_language_and_scheme_are_the_browsers(
    visit: Callable[..., Visit], tmp_path: Path, scheme: str, locale: str
) -> None:
    """The language button changes all texts, also of earlier answers; screenshots are saved."""
    question, ready, sources, other, others = {
        "en-GB": (CAPITAL, "ready", "Sources", "zh", "来源"),
        "zh-CN": ("挪威的首都是哪里？", "就绪", "来源", "en", "Sources"),
    }[locale]
    look = {"color_scheme": scheme, "viewport": {"width": 900, "height": 800}}
    with serving(session(SpellingEngine(TWO_SEARCHES))) as url:
        page = visit(url, locale=locale, **look)
        page.see("#state", ready)
        page.tab.screenshot(path=tmp_path / "empty.png")
        ask(page, question)
        page.see(".sources", sources)
        page.tab.locator(".sources button").first.click()
        page.tab.screenshot(path=tmp_path / "answer.png")
        page.tab.set_viewport_size({"width": 380, "height": 700})
        page.tab.screenshot(path=tmp_path / "narrow.png")
        assert not page.tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        page.tab.locator("#language").click()
        page.see(".sources", others)
        assert page.tab.evaluate("document.documentElement.lang") == other
        page.open()
        assert page.tab.evaluate("document.documentElement.lang") == other
    assert page.complaints == []
