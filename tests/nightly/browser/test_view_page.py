"""The page in headless Chromium, with the real application on a real port."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as playwright

from search_r1.view import app
from search_r1.view.app import ReplayRequest, Runs, create_app
from search_r1.view.run import Run
from tests.apps import running
from tests.nightly.browser.tabs import Visit, chromium
from tests.runs import written as runs
from tests.view.conftest import folder as folder
from tests.view.conftest import open_run as open_run
from tests.view.conftest import run as run
from tests.view.test_replaying import replay_output
from verl.types import Status

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def visit(browser: Any, run: Run) -> Iterator[Callable[..., Visit]]:
    """A function that opens a tab on a new application, or on an address."""
    contexts, servers = [], []

    def open_tab(
        url: str | None = None, token: str | None = None, *others: Run, locale: str = "en-US"
    ) -> Visit:
        if url is None:
            servers.append(running(create_app(Runs([run, *others]), token)))
            url = servers[-1].__enter__() + "/"
        contexts.append(browser.new_context(locale=locale))
        return Visit(contexts[-1].new_page(), url)

    yield open_tab
    for context in contexts:
        context.close()
    for server in servers:
        server.__exit__(None, None, None)


def test_curves_follow_a_run(visit: Callable[..., Visit], run: Run, folder: Path) -> None:
    """A new step changes the readout without a reload; arrow keys move along the curve."""
    page = visit()
    page.open()
    page.see("figure:has-text('actor/entropy') .readout", "0.5")
    runs.add_metrics(folder, 3, **{"actor/entropy": 0.125})
    run.refresh()
    page.see("figure:has-text('actor/entropy') .readout", "0.125")
    figure = page.tab.locator("figure:has-text('actor/entropy')").first
    figure.focus()
    figure.press("ArrowLeft")
    page.see("figure:has-text('actor/entropy') .readout", "step 2")
    figure.press("Enter")
    playwright.expect(page.tab.locator(".chart-slot.wide figure").first).to_be_focused()
    page.tab.get_by_label("Metrics").fill("no such")
    page.see(".curves", "No metric has such a name")
    assert page.complaints == []


def test_two_runs_are_overlaid(
    visit: Callable[..., Visit], open_run: Callable[[Path], Run], tmp_path: Path
) -> None:
    """A chart has a line of each run; each run's trajectories are shown."""
    page = visit(None, None, open_run(runs.write_run(tmp_path / "other", template="short")))
    page.open()
    page.see("figure:has-text('actor/entropy')", "actor/entropy")
    assert page.tab.locator("figure:has-text('actor/entropy') .line").count() % 2 == 0
    assert page.texts(".legend .key") == ["run", "other"]
    page.tab.keyboard.press("2")
    page.tab.locator("#run").select_option("1")
    page.see(".count", "of 7 trajectories")
    assert "run=1" in page.tab.url and page.complaints == []


def test_a_trajectory_is_found_and_read_by_keys_alone(visit: Callable[..., Visit]) -> None:
    """A search leads from the list to a token's log-prob, and to the question over the steps."""
    page = visit()
    page.open()
    keys = page.tab.keyboard
    keys.press("2")
    page.see(".count", "1–7 of 7 trajectories")
    keys.press("/")
    keys.type("niño")
    page.see(".count", "1–1 of 1 trajectory")
    page.tab.locator("a.question").first.focus()
    keys.press("Enter")
    page.see("h2.question", "Who is 100% _real_?")
    page.tab.locator(".dialogue").focus()
    keys.press("End")
    written = runs.dialogue("Who is 100% _real_?", ["El Niño"], "El Niño 😀").segments[-1]
    shown = page.texts("aside .facts dd")
    assert shown[:4] == ['">"', str(written.ids[-1]), "policy", "1"]
    page.see("aside .facts", "log-prob of the engine")
    assert "".join(page.texts(".segment.policy .token")) == written.text
    page.tab.get_by_role("link", name="This question over the steps").click()
    page.see(".cards", "step 1, sample 0")
    assert page.complaints == []


def test_filters_pages_and_side_by_side(visit: Callable[..., Visit]) -> None:
    """A missed answer is found, its document is marked, and later trajectories are next to it."""
    page = visit()
    page.open("#/trajectories")
    page.tab.locator("select[name=outcome]").select_option("missed")
    page.see(".count", "1–1 of 1 trajectory")
    page.tab.locator("a.question").first.click()
    page.see(".searches", "has the answer")
    assert page.texts("details.has-answer summary") == ["Francehas the answer"]
    page.tab.get_by_role("link", name="This question over the steps").click()
    page.see("figure .readout", "1")
    assert len(page.texts("article.card")) == 2 + 2
    assert len(page.texts("article.card.right")) == 2
    assert page.complaints == []


def test_a_validation_is_not_shown_as_trained_on(visit: Callable[..., Visit]) -> None:
    """Its turns have no loss mask; those of a training trajectory show what is in the loss."""
    page = visit()
    page.open("#/trajectory?run=0&kind=val&step=2&line=0")
    page.see("aside .facts", "validations are recorded as text only")
    page.see(".segment.policy header", "policy · search: France")
    page.open("#/trajectory?run=0&kind=train&step=2&line=0")
    page.see(".segment.policy header", "policy · in the loss")
    page.see(".segment.observation header", "masked")
    assert page.complaints == []


def test_the_list_follows_a_run(visit: Callable[..., Visit], run: Run, folder: Path) -> None:
    """New trajectories appear in the list, and their values among the filters' choices."""
    page = visit()
    page.open("#/trajectories?status=out_of_turns")
    page.see(".count", "1–1 of 1 trajectory")
    new = runs.dialogue("New?", ["x"], None)
    new.status = Status.OUT_OF_BUDGET
    runs.write_rollouts(folder, 3, [(new, 0.0), (runs.dialogue("New?", ["x"], None), 0.0)])
    run.refresh()
    page.see(".count", "1–2 of 2 trajectories")
    assert page.tab.locator("select[name=status]").input_value() == "out_of_turns"
    page.tab.locator("select[name=status]").select_option("out_of_budget")
    page.see(".count", "1–1 of 1 trajectory")
    assert page.complaints == []


def test_hostile_texts_stay_texts(visit: Callable[..., Visit]) -> None:
    """On every page they are shown literally, never run or loaded."""
    page, loaded = visit(), list[str]()
    page.tab.on("request", lambda request: loaded.append(request.url))
    shown = runs.HOSTILE.replace("\u202e", "\\u202e")
    for address in ("#/trajectories", "#/trajectory?run=0&kind=train&step=2&line=2",
                    "#/question?uid=train.parquet%233", "#/curves"):  # fmt: skip
        page.open(address)
        page.tab.wait_for_load_state("networkidle")
        if "curves" not in address:
            page.see("main", shown)
        assert page.tab.locator("main img, main script, main iframe").count() == 0
        assert "boom" not in page.tab.title()
    assert all(url.startswith((page.url, "about:", page.url.rstrip("/"))) for url in loaded)
    assert page.complaints == []


def test_a_token_is_required(visit: Callable[..., Visit]) -> None:
    """Nothing of the run is shown before the token is entered."""
    page = visit(token="secret")
    page.open("#/trajectories")
    assert page.tab.locator("tbody tr").count() == 0
    page.tab.get_by_label("Access token").fill("secret")
    page.tab.keyboard.press("Enter")
    page.see(".count", "1–7 of 7 trajectories")
    assert page.tab.locator("#access").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable(browser: Any, run: Run, scheme: str) -> None:
    """The contrast of text and background is 4.5 or more, by WCAG's formula."""
    with running(create_app(Runs([run]))) as url:
        context = browser.new_context(color_scheme=scheme)
        page = Visit(context.new_page(), url + "/")
        page.open("#/trajectories")
        page.see(".count", "7")
        colors = page.tab.evaluate(
            "() => { const s = getComputedStyle(document.documentElement);"
            " return ['ink', 'quiet', 'good', 'warn', 'card', 'paper']"
            ".map((n) => s.getPropertyValue(`--${n}`).trim()); }")  # fmt: skip
        context.close()
    *inks, card, paper = map(luminance, colors)
    for ink in inks:
        for ground in (card, paper):
            light, dark = max(ink, ground), min(ink, ground)
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_turn_is_edited_and_replayed_by_keys_alone(
    visit: Callable[..., Visit], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request contains only the changes; the result is shown as text and gets the focus."""
    requests: list[ReplayRequest] = []

    async def run_replay(command: list[str], request: ReplayRequest) -> tuple[bytes, bytes]:
        requests.append(request)
        if request.turn == 3:
            return b"", b"--turn: got 3, expected another\n"
        gradient: dict[str, Any] = dict.fromkeys(
            ("norm_recorded", "norm_replayed", "norm_of_change"), 0.5
        )
        gradient |= {"cosine": None, "cosine_of_change": -0.25}
        pair = {"recorded": -1.0, "replayed": None}
        return replay_output(run, notes=[runs.HOSTILE], advantage=pair, gradient=gradient), b""

    monkeypatch.setattr(app, "_run_replay", run_replay)
    page = visit()
    page.open("#/trajectory?run=0&kind=train&step=1&line=0")
    summary = page.tab.locator("details.edit summary")
    playwright.expect(summary).to_have_count(3)
    summary.first.focus()
    keys = page.tab.keyboard
    keys.press("Enter")
    page.tab.locator("details.edit[open] input[name=query]").focus()
    keys.press("Home")
    keys.type("old ")
    keys.press("Enter")
    page.see(".replayed .verdict", "Other.")
    page.see(".replayed .facts", "-0.25")
    page.see(".replayed ul", runs.HOSTILE.replace("\u202e", "\\u202e"))
    playwright.expect(page.tab.locator(".replayed h2")).to_be_focused()
    page.tab.locator("details.edit[open] button").click()
    page.tab.locator("details.edit").nth(1).locator("summary").click()
    page.tab.locator("details.edit").nth(1).locator("textarea").nth(1).fill("It rains.")
    page.tab.locator("details.edit").nth(1).locator("button").click()
    playwright.expect(page.tab.locator(".replayed")).to_have_count(3)
    page.tab.locator("details.edit").nth(2).locator("summary").click()
    page.tab.locator("details.edit").nth(2).locator("button").click()
    page.see("details.edit:nth-of-type(1) >> nth=2", "--turn: got 3, expected another")
    edits = [request.model_dump(exclude_none=True, exclude_defaults=True) for request in requests]
    for edit, turn in zip(edits, (1, 1, 2, 3), strict=True):
        assert (edit.pop("step"), edit.pop("line"), edit.pop("turn", 1)) == (1, 0, turn)
    assert edits[:2] == [{"query": "old capital"}] * 2 and edits[3] == {}
    assert [d["text"] for d in edits[2]["documents"][0]] == ["It rains.", "Its capital is Rome."]
    assert page.tab.locator("main img, main script").count() == 0 and "boom" not in page.tab.title()
    assert [c for c in page.complaints if "422" not in c] == []


def test_the_page_speaks_chinese(visit: Callable[..., Visit]) -> None:
    """By the browser's language, until another one is chosen."""
    page = visit(locale="zh-CN")
    page.open("#/trajectories")
    page.see("#tabs", "轨迹")
    page.see("main th", "步")
    page.tab.locator("main a.question").first.click()
    page.see("main aside h2", "词元")
    page.tab.locator("#language").click()
    page.see("main aside h2", "Token")
    page.see("#tabs", "Curves")
    assert page.complaints == []
