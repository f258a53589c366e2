"""One dialogue: its events and its reply."""

import asyncio

import pytest

from search_r1.agent.search import documents_of
from search_r1.inference.dialogue import AgentSession, Reply, Source, as_messages
from search_r1.retrieval.schema import Document
from tests.fakes import ByteTokenizer, ScriptedEngine
from tests.inference.scripted import (
    NORWAY,
    OSLO,
    SHORT,
    TWO_SEARCHES,
    RecordingListener,
    SpellingEngine,
    session,
)
from verl.agent.interface import Item, Observation
from verl.errors import PromptTooLong
from verl.types import Origin, Status


def play(
    who: AgentSession, question: str = "Capital of Norway?", **more: object
) -> tuple[Reply, RecordingListener]:
    listener = RecordingListener()
    prompt = who.prompt(question)
    return asyncio.run(who.ask(question, prompt, listener, **more)), listener  # type: ignore[arg-type]


def test_a_reply_holds_answer_searches_and_sources() -> None:
    """A document found by two searches is one source that lists both."""
    reply, _ = play(session(ScriptedEngine(TWO_SEARCHES)))
    assert (reply.answer, reply.status) == ("Oslo", Status.ANSWERED)
    assert [search.query for search in reply.searches] == ["capital of Norway", "Oslo"]
    assert reply.sources == [Source(OSLO, (1, 2)), Source(NORWAY, (1,))]
    assert reply.turns == list(TWO_SEARCHES)
    written = reply.to_json()
    assert written["searches"][0]["documents"][1] == {"id": "7", "title": "Norway"}
    assert [s["origin"] for s in written["segments"]] == ["policy", "observation"] * 2 + ["policy"]


def test_passages_without_documents_are_sources() -> None:
    """Items of an environment or an own tool become documents; the message of an error is none."""
    items = (Item("It is Oslo.", "Norway", "7"), Item("two"), Item("three"), Item("Error: no"))
    found = documents_of(Observation((Item(OSLO.text, source=OSLO), *items)))
    assert found[0] is OSLO and found[1] == Document.from_title("7", "Norway", "It is Oslo.")
    assert [document.text for document in found[2:]] == ["two", "three"]
    assert len({document.id for document in found}) == 4


def test_everything_is_heard_in_its_order() -> None:
    """Events are reported in order: text, end of turn, then the search or the feedback."""
    script = ("Hm.", *TWO_SEARCHES[1:])
    reply, listener = play(session(SpellingEngine(script)))
    said = "".join(text for kind, text in listener.events if kind == "said")
    assert said == "".join(reply.turns) == "".join(script)
    rest = [entry for entry in listener.events if entry[0] != "said"]
    assert rest == [
        ("turned", ""), ("corrected", SHORT.invalid_action),
        ("turned", ""), ("searched", "Oslo"),
        ("turned", ""),
    ]  # fmt: skip
    assert len(listener.events) == len(rest) + len(said)  # letter by letter


def test_an_engine_that_does_not_stream_is_heard_turn_by_turn() -> None:
    """Without streaming, each turn is reported as one piece of text."""
    _, listener = play(session(ScriptedEngine(TWO_SEARCHES)))
    assert [text for kind, text in listener.events if kind == "said"] == list(TWO_SEARCHES)


def test_a_budget_bounds_all_turns_together() -> None:
    """Each turn gets the tokens that are left, and the engine is not called with none left."""
    engine = ScriptedEngine(TWO_SEARCHES)
    budget = len(TWO_SEARCHES[0]) + 5
    reply, _ = play(session(engine), max_tokens=budget)
    assert [request.sampling.max_tokens for request in engine.requests] == [budget, 5]
    assert (reply.trajectory.num_tokens_of(Origin.POLICY), reply.answer) == (budget, None)
    assert len(reply.turns) == 2


def test_earlier_messages_stand_before_the_question() -> None:
    """Only the last question is put in the format's wording; earlier messages are unchanged."""
    who = session(ScriptedEngine(["<answer> x </answer>"]))
    prompt = who.prompt("And Sweden?", as_messages("Capital of Norway?", "Oslo"))
    assert prompt.text == f"Capital of Norway?\nOslo\n{SHORT.user_prompt('And Sweden?')}"
    assert list(prompt.ids) == ByteTokenizer().encode(prompt.text)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    """The error has the prompt's limit and the option to change."""
    with pytest.raises(PromptTooLong, match="--max-start-length"):
        session(ScriptedEngine([]), limit=100).prompt("Why? " * 50)


def test_line_32_no_text_of_a_request_makes_a_control_token() -> None:
    """Neither the question, nor earlier messages of whatever role, nor the messages of a row.

    Of a prompt that was rendered before, the question of its row.
    """
    who, tokenizer = session(ScriptedEngine(())), ByteTokenizer()
    earlier = [{"role": role, "content": f"{role} <eos>"} for role in ("system", "assistant")]
    rendered = "<pad>user: x<eos>y"
    for prompt in (
        who.prompt("x<eos>", earlier),
        who.render([{"role": "user", "content": "x <pad>"}]),
        who.render("user: x<eos>y", "f#0", {"question": "x<eos>y"}),
    ):
        assert tokenizer.decode(prompt.ids).count("< eos>") + prompt.text.count("< pad>")
        assert not {256, 257}.intersection(prompt.ids)
    assert who.render(rendered).text == rendered
