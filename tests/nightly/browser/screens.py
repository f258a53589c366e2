"""The three pages as a reader sees them: served over the example world, and photographed.

`python -m tests.nightly.browser.screens docs/pictures` makes the pictures of the docs. The test
makes those of all looks (dark, phone, Chinese) and leaves them in pytest's folder.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from example import geography
from search_r1.agent.generation import search_agent
from search_r1.agent.tags import SEARCH_R1
from search_r1.inference.dialogue import AgentSession
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.server import create_app
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from search_r1.view.app import Runs
from search_r1.view.app import create_app as create_view
from search_r1.view.run import Run
from tests.agent_server.services import serving
from tests.apps import running
from tests.fakes import ByteTokenizer
from tests.nightly.browser.paced import PacedEngine
from tests.nightly.browser.tabs import chromium
from tests.runs import written as runs
from verl.agent.dialogue import Limits
from verl.types import Sampling

QUESTION = "What is the calling code of the country of Oslo?"
TURNS = (
    "<think> First I need the country of Oslo. </think> <search> country of Oslo </search>",
    "<think> Oslo is in Norway. Now its calling code. </think> <search> Norway calling code "
    "</search>",
    "<think> The first passage says it. </think> <answer> 47 </answer>",
)
HYBRID = "bm25+bag"
DESK, PHONE = {"width": 1100, "height": 720}, {"width": 390, "height": 780}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {}, "dark": {"color_scheme": "dark"}, "phone": {"viewport": PHONE},
    "chinese": {"locale": "zh-CN"},
}  # fmt: skip


@dataclass
class Pages:
    """The addresses of the pages, and the engine that speaks on the chat page."""

    retriever: str
    chat: str
    view: str
    engine: PacedEngine


@contextmanager
def served(folder: Path) -> Iterator[Pages]:
    """Serve a hybrid over the example world, an agent that asks it, and a small run."""
    index, corpus = folder / "index", str(geography.CORPUS)
    build_index(BuildConfig(HYBRID, corpus, str(index), "hash:64"))
    retriever = build_retriever(
        RetrieverConfig(HYBRID, corpus, str(index), encoder=EncoderConfig("hash:64"))
    )
    run = Run(write_run(folder / "demo"), folder / "read")
    run.refresh()
    engine = PacedEngine(TURNS * len(LOOKS))
    with ExitStack() as stack:
        url = stack.enter_context(running(create_app(retriever)))
        limits, tokenizer = Limits(max_turns=3, max_obs_length=2000), ByteTokenizer()
        agent = search_agent(RetrievalClient(url, 3), tokenizer, limits, SEARCH_R1)
        session = AgentSession(agent, engine, tokenizer, Sampling(500, 0.0), 0, 8000)
        chat = stack.enter_context(serving(session))
        view = stack.enter_context(running(create_view(Runs([run]))))
        yield Pages(url, chat, view, engine)


def write_run(folder: Path) -> Path:
    """Write a run that learns: six steps of four questions, and a validation at the end."""
    runs.start_run(folder)
    world, chance = geography.training_world(), random.Random(0)
    questions = [q for q in geography.build_questions(world, 0) if len(q.plan) == 2][:4]
    for step in range(1, 7):
        scored = []
        for row, question in enumerate(questions):
            is_right = chance.random() < step / 6
            hops = question.plan if is_right else question.plan[: chance.randrange(2)]
            searches = [(query, [(found.title, found.text)]) for query, found in hops]
            answer = question.answers[0] if is_right else "unknown"
            written = runs.dialogue(question.text, [question.answers[0]], answer, searches, row=row,
                                    group=f"{step}/{row}", version=step - 1)  # fmt: skip
            scored.append((written, float(is_right)))
        runs.write_rollouts(folder, step, scored)
        mean = sum(score for _, score in scored) / len(scored)
        runs.add_metrics(folder, step, **{
            "critic/score/mean": mean, "actor/entropy": 1.6 / (1 + step),
            "env/valid_searches": 0.5 + step / 5, "actor/grad_norm": 1.0 + chance.random(),
            "timing_s/step": 8 + chance.random(), "val/em": 0.95 if step == 6 else None,
        })  # fmt: skip
    runs.write_validation(folder, 6, scored)
    return folder


def photographs(browser: Any, pages: Pages, look: str) -> Iterator[tuple[str, Any]]:
    """Visit each page in a look; yield a name and the tab whenever it is worth a picture."""
    context = browser.new_context(**{"locale": "en-US", "viewport": DESK} | LOOKS[look])
    tab = context.new_page()
    tab.goto(pages.retriever)
    tab.wait_for_selector("#examples button")
    yield "retriever-first", tab
    tab.goto(f"{pages.retriever}/?q=calling+code+of+Norway&beside=bm25")
    tab.wait_for_selector("#other .passage")
    tab.wait_for_selector(".why")
    yield "retriever", tab
    tab.goto(pages.chat)
    tab.wait_for_selector("#examples button")
    yield "chat-first", tab
    tab.locator("#question").fill(QUESTION)
    tab.locator("#question").press("Enter")
    tab.wait_for_selector(".thought")
    yield "chat-working", tab
    for _ in TURNS:
        pages.engine.turns.release()
    tab.wait_for_selector(".end")
    yield "chat", tab
    tab.goto(pages.view)
    tab.wait_for_selector("figure")
    tab.wait_for_load_state("networkidle")
    yield "view-curves", tab
    tab.goto(f"{pages.view}/#/trajectories")
    tab.wait_for_selector("tbody tr")
    yield "view-list", tab
    tab.goto(f"{pages.view}/#/trajectory?run=0&kind=train&step=6&line=0")
    tab.wait_for_selector(".segment")
    yield "view-dialogue", tab
    context.close()


DOCS = ("retriever", "chat", "view-curves", "view-dialogue")
"""The pictures that the docs show."""


def main(folder: Path) -> None:
    """Write the pictures of the docs, with 256 colours."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        pages, browser = stack.enter_context(served(Path(scratch))), stack.enter_context(chromium())
        for name, tab in photographs(browser, pages, "light"):
            if name in DOCS:
                picture = Image.open(BytesIO(tab.screenshot()))
                paletted = picture.convert("P", palette=Image.Palette.ADAPTIVE)
                paletted.save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
