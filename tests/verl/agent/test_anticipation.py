"""Anticipating tools get the calls of a turn while it is sampled; other tools cost nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, RecitingEngine, pieces
from tests.verl.agent.chat_templates import QWEN, ChatTokenizer
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.grammar import Grammar, Tag
from verl.agent.interface import Item, Observation, Tool, ToolCall, text_arguments
from verl.agent.native import NativeFormat
from verl.agent.tags import TagFormat, plain_format
from verl.types import Prompt, Sampling, Status, Trajectory, start_trajectory

TOKENIZER = ByteTokenizer()
PROMPT = Prompt("test#0", tuple(TOKENIZER.encode("one\nWhere?")), "test", ("x",))
TAGS = plain_format(()).with_tools(("find",))
NATIVE = NativeFormat(ChatTokenizer(QWEN), ())


@dataclass
class Find(Tool):
    """Records anticipated and executed calls, separately for each dialogue."""

    anticipates: bool = True
    log: list[str] = field(default_factory=list)
    dialogues: list[Find] = field(default_factory=list)

    name = "find"
    parameters = text_arguments(what="What.")

    def for_dialogue(self, start: Trajectory) -> Tool:
        self.dialogues.append(Find(self.anticipates))
        return self.dialogues[-1]

    def anticipate(self, **arguments: Any) -> None:
        self.log.append(arguments["what"])

    def ended(self) -> dict[str, float]:
        return {"anticipated": float(len(self.log))}

    async def call(self, **arguments: Any) -> Observation:
        self.log.append("CALL")
        return Observation((Item(arguments["what"]),))


def anticipated(format: TagFormat | NativeFormat, text: str) -> list[list[Any]]:
    """Return the arguments of the calls after each piece of text, where the calls changed."""
    parts = pieces(text)
    begun = [format.begun("".join(parts[:n])) for n in range(len(parts) + 1)]
    return [
        [list(call.arguments.values()) if not isinstance(call.arguments, str) else call.arguments
         for call in calls]
        for before, calls in zip([(), *begun], begun, strict=False)
        if calls != before and calls
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> so </think> <find> two words </find>", [["two words"]]),
        ("<find>two words</find>", [["two words"]]),
        ("<find> two \n words  </find>", [["two"], ["two \n words"]]),
        ("<find> a < b </find>", [["a"], ["a < b"]]),
        ("<find>  </find> <answer> x </answer>", []),
        ("<find> never closed", []),
        ("no call", []),
    ],
)
def test_a_tag_call_is_anticipated_when_its_last_word_is_complete(
    text: str, expected: list[list[str]]
) -> None:
    """Neither a call whose next word has begun is anticipated, nor one that is closed."""
    assert anticipated(TAGS, text) == expected


def test_the_last_opening_tag_determines_the_call() -> None:
    """As in `read_turn`: an unclosed opening is skipped."""
    tags = Grammar(tools=(("find", Tag("<|q|>", "<|/q|>")), ("other", Tag("<o>", "</o>"))))
    format = TagFormat("test", "{question}", "", tags)
    assert format.begun("<|q|> a <|q|> b <") == (ToolCall("find", "b"),)
    assert format.begun("<|q|> a <o> b </") == (ToolCall("other", "b"),)


def test_native_calls_are_anticipated_with_complete_values() -> None:
    """A value is complete at its closing quote; a closed call stays while others follow."""
    one, two = (json.dumps({"name": "find", "arguments": {"what": w}}) for w in ("a b", "c"))
    text = f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>"
    assert anticipated(NATIVE, text) == [[[]], [["a b"]], [["a b"], []], [["a b"], ["c"]]]
    bare = '{"name": "find", "parameters": {"what": "a b"'
    assert NATIVE.begun(bare) == (ToolCall("find", {"what": "a b"}),)
    assert NATIVE.begun("so {") == NATIVE.begun("<tool_call>\n[1") == ()


def play(tool: Find, max_turns: int, enabled: bool = True) -> tuple[Trajectory, RecitingEngine]:
    """Run a dialogue of two calls and an answer."""
    environment = Environment((tool,), enabled)
    agent = DialogueAgent(Limits(max_turns=max_turns), TAGS, environment, TOKENIZER)
    engine = RecitingEngine(
        {"one": ["<find> a b </find>", "<find> c </find>", "<answer> d </answer>"]}
    )
    return asyncio.run(agent.run(start_trajectory(PROMPT), engine, Sampling(1))), engine


def test_a_tool_gets_a_call_before_it_is_executed() -> None:
    """In every turn that may call; numbers of the dialogue's tool are in its statistics."""
    tool = Find()
    done, engine = play(tool, max_turns=3)
    assert done.status is Status.ANSWERED and engine.streams == 3
    (own,) = tool.dialogues
    assert list(dict.fromkeys(own.log)) == ["a b", "CALL", "c"]
    assert own.log[-1] == "CALL" and tool.log == []
    assert done.stats["anticipated"] == len(own.log) and done.stats["valid_find_calls"] == 2


def test_the_last_turn_anticipates_nothing() -> None:
    """Its calls are not executed."""
    tool = Find()
    done, engine = play(tool, max_turns=1)
    assert done.status is Status.OUT_OF_TURNS and engine.streams == 1
    assert set(tool.dialogues[0].log) == {"a b", "CALL"}


@pytest.mark.parametrize(("anticipates", "enabled"), [(False, True), (True, False)])
def test_turns_are_not_streamed_without_anticipation(anticipates: bool, enabled: bool) -> None:
    """Streaming would slow the engine down."""
    _, engine = play(Find(anticipates), max_turns=3, enabled=enabled)
    assert engine.streams == 0
