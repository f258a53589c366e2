"""The dialogue loop with tools other than search: tokens, masks, counts, faults."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.core.agent.chat_templates import ChatTokenizer
from tests.fakes import ByteTokenizer, ScriptedEngine, texts
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.grammar import Grammar
from verl.agent.interface import Item, Observation, Tool, ToolCall, Turn, text_arguments
from verl.agent.native import NativeFormat
from verl.agent.served import fingerprints, tool_problems, unavailable
from verl.agent.tags import plain_format
from verl.batch import TokenBatch
from verl.errors import ToolError, ToolRefused
from verl.types import Completion, Failure, Origin, Prompt, Sampling, Status, Trajectory
from verl.types import start_trajectory as start

TOKENIZER = ByteTokenizer()
PROMPT = Prompt("test#0", tuple(TOKENIZER.encode("How many? ")), "test", ("x",))


class Clock(Tool):
    """Returns a time; reports one retry per call."""

    name = "clock"
    description = "Tells the time in a city."
    parameters = text_arguments(city="Where.")
    faults = ("clock_retried",)

    async def call(self, city: str) -> Observation:
        if city == "nowhere":
            raise ToolError("the clock stands still", {"clock_retried": 2})
        return Observation((Item(f"noon in {city}"), Item("or so")), {"clock_retried": 1})


class Doubler(Tool):
    """A tool whose main argument is a number."""

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
    """Each tool has the tag of its name; results are observations, and calls are counted."""
    calls: list[ToolCall] = []
    environment = Environment(TOOLS, on_observation=lambda call, observation: calls.append(call))
    script = ["<clock> Oslo </clock>", "<double>21</double>", "<answer>42</answer>"]
    done = play(script, environment)
    assert done.status is Status.ANSWERED
    assert texts(done, Origin.OBSERVATION) == [
        "\n\n<information>noon in Oslo\nor so\n</information>\n\n",
        "\n\n<information>42\n</information>\n\n",
    ]
    assert calls == [ToolCall("clock", "Oslo"), ToolCall("double", "21")]
    batch = TokenBatch.from_trajectories([done])
    policy = [t for t, own in zip(done.ids, batch.tokens["policy_mask"], strict=True) if own]
    assert TOKENIZER.decode(policy) == "".join(script)
    assert done.faults == {"clock_retried": 1}
    assert done.stats == {
        "turns": 3, "clock_calls": 1, "valid_clock_calls": 1, "doublings": 1, "valid_doublings": 1,
        "valid_actions": 3, "invalid_actions": 0, "truncated_turns": 0, "malformed_turns": 0,
        "observation_tokens": done.num_tokens_of(Origin.OBSERVATION), "answered": 1,
    }  # fmt: skip


def test_an_invalid_argument_is_explained_to_the_policy() -> None:
    """It is neither an infrastructure failure nor a valid action."""
    done = play(["<double>two</double>", "<answer>4</answer>"])
    assert "number of double: got 'two', expected integer" in done.text
    assert (done.stats["valid_doublings"], done.stats["malformed_turns"]) == (0, 1)


class Marked(ByteTokenizer):
    """A tokenizer with unusual special tokens."""

    all_special_tokens = ("[SEP]", "<eos>", "▁end")  # type: ignore[assignment]


class Hostile(Tool):
    """Returns documents with the tokenizer's special tokens in every field that is shown."""

    name = "clock"
    parameters = text_arguments(place="")
    shows_ids = True

    async def call(self, **arguments: Any) -> Observation:
        text = "a [SEP] b [SEP][SEP] <eos> ▁end"
        return Observation((Item(text, text, text), Item(text)))


def test_line_07_special_tokens_in_documents_are_neutralized() -> None:
    """No text of a tool is encoded as a special token, whatever the tokenizer."""
    environment = Environment((Hostile(),))
    qwen = ChatTokenizer()
    qwen.all_special_tokens = Marked.all_special_tokens
    for format in (plain_format(environment.tools), NativeFormat(qwen, environment.tools)):
        agent = DialogueAgent(Limits(), format, environment, Marked())
        _, text = asyncio.run(agent.consult(ToolCall("clock", "x")))
        assert text.count("a [ SEP]") >= 2
        assert not any(token in text for token in Marked.all_special_tokens)


def test_a_tool_that_refuses_the_run_marks_the_trajectory() -> None:
    """The mark makes the run end instead of sampling the trajectory again."""

    class Refusing(Clock):
        async def call(self, **arguments: Any) -> Observation:
            raise ToolRefused("no key")

    done = play(["<clock>x</clock>"], Environment((Refusing(),)))
    assert (done.status, done.failure) == (Status.FAILED, Failure("no key", is_final=True))
    (failure,) = filter(None, [play(["<clock>nowhere</clock>"]).failure])
    assert not failure.is_final


def test_line_26_a_tool_that_fails_ends_the_trajectory() -> None:
    """Its faults are counted, and its message is not shown to the policy."""
    done = play(["<clock>nowhere</clock>"])
    assert (done.status, done.error) == (Status.FAILED, "the clock stands still")
    assert done.faults == {"clock_retried": 2}
    assert "stands still" not in done.text


class SeveralCalls:
    """A format with several calls in a turn, which ends at the end of sequence."""

    name, stop, closed_think, acts_in_think = "several", (), "", False

    def user_prompt(self, question: str) -> str:
        return question

    def parse(self, completion: Completion) -> Turn:
        if "|" not in completion.text:
            return Turn(answer=completion.text)
        named = (part.split(":") for part in completion.text.split("|") if part)
        return Turn(tuple(ToolCall(tool, {"city": city}) for tool, city in named))

    def respond(self, turn: Turn, results: Any, reserved: Sequence[str]) -> str:
        return "".join(f"[{' '.join(item.text for item in items)}]" for items in results or ())


def test_several_tools_can_be_called_in_one_turn() -> None:
    """Results are in the order of the calls; a call of an unknown tool results in an error text."""
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
def test_results_of_several_calls_are_cut_equally(limit: int, expected: str) -> None:
    """Whole items of every call, or the first item of each call cut to the same number of words."""
    results = [(Item("a b cccccc"), Item("or so")), (Item("d e ffffff"), Item("or so"))]
    several = DialogueAgent(Limits(max_obs_length=limit), SeveralCalls(), Environment(), TOKENIZER)
    fitting = several.fit(Turn(), results)
    assert SeveralCalls().respond(Turn(), fitting, ()) == expected


@pytest.mark.parametrize(
    "text",
    ["奥斯陆是挪威的首都。" * 60, '{"city":"Oslo","people":1},' * 60, "Oslo " + "首都" * 300],
)
def test_a_text_without_spaces_is_cut_to_what_fits(text: str) -> None:
    """As Chinese or compact data: at least nine tenths of the budget are used (in bytes here)."""
    limit = 600
    agent = DialogueAgent(Limits(max_obs_length=limit), SeveralCalls(), Environment(), TOKENIZER)
    [[item]] = agent.fit(Turn(), [(Item(text),)])
    assert text.startswith(item.text) and 0.85 * limit < len(item.text.encode()) <= limit


def test_disabled_tools_are_not_used() -> None:
    """They are not called, probed or asked for fingerprints, but invalid calls are counted."""

    class Away(Clock):
        def probe(self, seconds: float) -> str:
            return "away"

    off = Environment((Away(),), enabled=False)
    assert unavailable(off, 1.0) is None
    assert fingerprints(off) == {} and not list(tool_problems(off, 1.0))
    on = Environment((Away(),))
    assert unavailable(on, 1.0) == (on.tools[0], "away")
    [problem] = tool_problems(on, 1.0)
    assert str(problem) == "tool clock: away; fix: make sure that it answers"
    done = play(["<clock>Oslo</clock>", "<answer>a</answer>"], off)
    assert (done.stats["clock_calls"], done.stats["valid_clock_calls"]) == (1, 0)


def test_the_plain_format_is_generated_from_the_tools() -> None:
    """Prompt and feedback contain each tool's tag, and the prompt its description."""
    plain = plain_format(TOOLS)
    assert "<clock> city </clock>: Tells the time in a city." in plain.user_prompt("Who?")
    assert plain.user_prompt("Who?").endswith("Question: Who?\n")
    assert "<clock>…</clock> or <double>…</double>" in plain.invalid_action
    assert plain.tags == Grammar().with_tools(["clock", "double"])
