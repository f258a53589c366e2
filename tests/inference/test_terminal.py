"""Output of dialogues on the terminal."""

import asyncio
import io

import pytest
from rich.console import Console

from search_r1.inference.terminal import Terminal
from search_r1.retrieval.protocol import Retrieval
from tests.fakes import ScriptedEngine, UnavailableRetriever
from tests.inference.scripted import TWO_SEARCHES, session


def shown(
    script: tuple[str, ...], *, full: bool = False, retrieval: Retrieval | None = None
) -> str:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=200, highlight=False), full)
    who = session(ScriptedEngine(script), retrieval, max_turns=2)
    terminal.conclude(asyncio.run(who.ask("Q?", who.prompt("Q?"), terminal)))
    return out.getvalue()


def test_documents_are_folded_and_sources_listed() -> None:
    """Titles are printed below each search, and sources with their searches below the answer."""
    assert shown(TWO_SEARCHES).splitlines() == [
        TWO_SEARCHES[0],
        "  search 1: 2 documents",
        "    Oslo [12]",
        "    Norway [7]",
        TWO_SEARCHES[1],
        "  search 2: 1 document",
        "    Oslo [12]",
        TWO_SEARCHES[2],
        "",
        "Answer: Oslo",
        "Sources",
        "  Oslo [12] (searches 1, 2)",
        "  Norway [7] (search 1)",
    ]


def test_documents_are_shown_in_full_on_request() -> None:
    """With `shows_documents` each text is printed below its title."""
    text = "Oslo is the capital of Norway."
    assert text not in shown(TWO_SEARCHES)
    assert f"    Oslo [12]\n      {text}\n" in shown(TWO_SEARCHES, full=True)


def test_square_brackets_of_the_policy_are_no_markup() -> None:
    """The model's text is printed verbatim, not as rich markup."""
    assert "[bold]x[/bold] [/]" in shown(("[bold]x[/bold] [/] <answer> a </answer>",))


@pytest.mark.parametrize(
    ("script", "retrieval", "end"),
    [
        (("Hm.", "Hm.", "Hm."), None, "no answer (out_of_turns)"),
        (
            TWO_SEARCHES,
            UnavailableRetriever(),
            "no answer (failed): no answer to capital of Norway",
        ),
    ],
)
def test_a_missing_answer_says_why(
    script: tuple[str, ...], retrieval: Retrieval | None, end: str
) -> None:
    """The last line says why there is no answer."""
    assert shown(script, retrieval=retrieval).splitlines()[-1] == end
