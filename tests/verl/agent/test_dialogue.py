"""The loop with tools that know nothing of search: tokens, masks, counts, faults."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, ScriptedEngine, texts
from tests.verl.agent.chat_templates import ChatTokenizer
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.grammar import Grammar
from verl.agent.interface import Item, Observation, Tool, ToolCall, Turn, text_arguments
from verl.agent.native import NativeFormat
from verl.agent.tags import plain_format
from verl.errors import ToolError, ToolRefused
from verl.types import Completion, Origin, Prompt, Sampling, Status, TokenBatch, Trajectory
from verl.types import start_trajectory as start

TOKENIZER = ByteTokenizer()
PROMPT = Prompt("test#0", tuple(TOKENIZER.encode("How many? ")), "test", ("x",))


class Clock(Tool):
    """Tells a time; tries twice."""

    name = "clock"
    description = "Tells the time in a city."
    parameters = text_arguments(city="Where.")
    faults = ("clock_retried",)

    async def call(self, city: str) -> Observation:
        if city == "nowhere":
            raise ToolError("the clock stands still", {"clock_retried": 2})
        return Observation((Item(f"noon in {city}"), Item("or so")), {"clock_retried": 1})


class Doubler(Tool):
    """Takes a number, not a text."""

    name = "double"
    parameters = {  # noqa: RUF012 a schema is never changed
        "properties": {"number": {"type": "integer"}, "times": {"type": "integer"}},
        "required": ["number"],
    }
    counted_as = "doublings"

    async def call(self, number: int, times: int = 1) -> Observation:
        return Observation((Item(str(number * 2**times)),))


TOOLS = (Clock(), Doubler())
BOTH = Environment(TOOLS)


def agent(environment: Environment, **limits: Any) -> DialogueAgent:
    return DialogueAgent(Limits(**limits), plain_format(environment.tools), environment, TOKENIZER)


def play(script: Sequence[str], environment: Environment = BOTH) -> Trajectory:
    run = agent(environment).run(start(PROMPT), ScriptedEngine(script), Sampling(1))
    return asyncio.run(run)


def test_tools_are_called_by_their_tags() -> None:
    """Each tool by the tag of its name; what it brings is observation, and all is counted."""
    heard: list[ToolCall] = []
    environment = Environment(TOOLS, on_observation=lambda call, observation: heard.append(call))
    script = ["<clock> Oslo </clock>", "<double>21</double>", "<answer>42</answer>"]
    done = play(script, environment)
    assert done.status is Status.ANSWERED
    assert texts(done, Origin.OBSERVATION) == [
        "\n\n<information>noon in Oslo\nor so\n</information>\n\n",
        "\n\n<information>42\n</information>\n\n",
    ]
    assert heard == [ToolCall("clock", "Oslo"), ToolCall("double", "21")]
    batch = TokenBatch.from_trajectories([done])
    policy = [t for t, own in zip(done.ids, batch.tokens["policy_mask"], strict=True) if own]
    assert TOKENIZER.decode(policy) == "".join(script)
    assert done.faults == {"clock_retried": 1}
    assert done.stats == {
        "turns": 3, "clock_calls": 1, "valid_clock_calls": 1, "doublings": 1, "valid_doublings": 1,
        "valid_actions": 3, "invalid_actions": 0, "truncated_turns": 0, "malformed_turns": 0,
        "observation_tokens": done.num_tokens_of(Origin.OBSERVATION), "answered": 1,
    }  # fmt: skip


def test_a_call_that_cannot_be_is_told_to_the_policy() -> None:
    """A wrong argument is no failure of infrastructure, and no valid action."""
    done = play(["<double>two</double>", "<answer>4</answer>"])
    assert "number of double: got 'two', expected integer" in done.text
    assert (done.stats["valid_doublings"], done.stats["malformed_turns"]) == (0, 1)


class Marked(ByteTokenizer):
    """With special tokens that no list of common ones has."""

    all_special_tokens = ("[SEP]", "<eos>", "▁end")  # type: ignore[assignment]


class Hostile(Tool):
    """Brings documents with the tokenizer's special tokens, in every field that is shown."""

    name = "clock"
    parameters = text_arguments(place="")
    shows_ids = True

    async def call(self, **arguments: Any) -> Observation:
        text = "a [SEP] b [SEP][SEP] <eos> ▁end"
        return Observation((Item(text, text, text), Item(text)))


def test_line_07_special_tokens_in_documents_are_broken() -> None:
    """Whatever the tokenizer's special tokens are, no text of a tool becomes one of them."""
    environment = Environment((Hostile(),))
    qwen = ChatTokenizer()
    qwen.all_special_tokens = Marked.all_special_tokens
    for format in (plain_format(environment.tools), NativeFormat(qwen, environment.tools)):
        played = DialogueAgent(Limits(), format, environment, Marked())
        _, words = asyncio.run(played.consult(ToolCall("clock", "x")))
        assert words.count("a [ SEP]") >= 2
        assert not any(token in words for token in Marked.all_special_tokens)


def test_a_tool_that_refuses_the_run_marks_the_trajectory() -> None:
    """So that the run ends, rather than samples it again."""

    class Refusing(Clock):
        async def call(self, **arguments: Any) -> Observation:
            raise ToolRefused("no key")

    done = play(["<clock>x</clock>"], Environment((Refusing(),)))
    assert (done.status, done.error, done.is_refused) == (Status.FAILED, "no key", True)
    assert not play(["<clock>nowhere</clock>"]).is_refused


def test_a_tool_that_fails_ends_the_trajectory() -> None:
    """Its faults are counted, its message is not among the tokens."""
    done = play(["<clock>nowhere</clock>"])
    assert (done.status, done.error) == (Status.FAILED, "the clock stands still")
    assert done.faults == {"clock_retried": 2}
    assert "stands still" not in done.text


class SeveralCalls:
    """A format as native tool calls need it: many calls in a turn, ended by end of sequence."""

    name, stop, closed_think, acts_in_think = "several", (), "", False

    def user_prompt(self, question: str) -> str:
        return question

    def parse(self, completion: Completion) -> Turn:
        if "|" not in completion.text:
            return Turn(answer=completion.text)
        named = (part.split(":") for part in completion.text.split("|") if part)
        return Turn(tuple(ToolCall(tool, {"city": city}) for tool, city in named))

    def respond(self, turn: Turn, found: Any, reserved: Sequence[str]) -> str:
        return "".join(f"[{' '.join(item.text for item in items)}]" for items in found or ())


def test_a_format_may_call_several_tools_in_one_turn() -> None:
    """All are carried out and answered in order; a tool that does not exist is told as such."""
    environment = Environment(TOOLS)
    engine = ScriptedEngine(["clock:Oslo|clock:Rome|watch:Bern", "noon"])
    play = DialogueAgent(Limits(), SeveralCalls(), environment, TOKENIZER).run
    done = asyncio.run(play(start(PROMPT), engine, Sampling(1)))
    assert texts(done, Origin.OBSERVATION) == [
        "[noon in Oslo or so][noon in Rome or so][Error: no tool 'watch'; there are: clock, double]"
    ]
    assert (done.stats["valid_clock_calls"], done.faults["clock_retried"]) == (2, 2)
    assert done.status is Status.ANSWERED


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (40, "[a b cccccc or so][d e ffffff or so]"),
        (30, "[a b cccccc][d e ffffff]"),
        (12, "[a b][d e]"),
        (4, "[][]"),
    ],
)
def test_what_several_calls_bring_is_cut_alike(limit: int, expected: str) -> None:
    """Whole items of every call, or else the first of each at the same number of words."""
    found = [(Item("a b cccccc"), Item("or so")), (Item("d e ffffff"), Item("or so"))]
    several = DialogueAgent(Limits(max_obs_length=limit), SeveralCalls(), Environment(), TOKENIZER)
    fitting = several.fit(Turn(), found)
    assert SeveralCalls().respond(Turn(), fitting, ()) == expected


def test_tools_that_are_switched_off_are_asked_nothing() -> None:
    """Neither calls nor probes nor fingerprints; their counts stay."""

    class Away(Clock):
        def probe(self, seconds: float) -> str:
            return "away"

    off = Environment((Away(),), enabled=False)
    assert (off.probe(1.0), off.identity(), list(off.preflight(1.0))) == (None, {}, [])
    on = Environment((Away(),))
    assert on.probe(1.0) == (on.tools[0], "away")
    [problem] = on.preflight(1.0)
    assert str(problem) == "tool clock: away; fix: make sure that it answers"
    done = play(["<clock>Oslo</clock>", "<answer>a</answer>"], off)
    assert (done.stats["clock_calls"], done.stats["valid_clock_calls"]) == (1, 0)


def test_the_plain_wording_is_made_of_the_tools() -> None:
    """Prompt and feedback name each tool's tag, and the prompt what it does."""
    plain = plain_format(TOOLS)
    assert "<clock> city </clock>: Tells the time in a city." in plain.user_prompt("Who?")
    assert plain.user_prompt("Who?").endswith("Question: Who?\n")
    assert "<clock>…</clock> or <double>…</double>" in plain.invalid_action
    assert plain.tags == Grammar().with_tools(["clock", "double"])
