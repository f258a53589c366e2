"""Native tool calls: the dialogue in the form of the model's own chat template.

The policy writes `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen2.5, Qwen3), any
number of times in a turn, or one bare JSON object with `name` and `parameters` (Llama 3.x). A turn
ends at the end of sequence. Results are appended as the template's tool messages, followed by the
assistant header of the next turn. Only these additions are rendered and the sampled tokens are
kept, so that templates that would rewrite earlier turns (Qwen3 drops their thinking) cannot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.agent.grammar import Grammar, Tag, answer_pattern, spans_between
from verl.agent.interface import Item, Tool, ToolCall, Turn
from verl.agent.tags import ITEM_WITH_ID, TagFormat
from verl.errors import ConfigError, explain
from verl.types import Completion

NAME = "native"
CALL = Tag("<tool_call>", "</tool_call>")
GRAMMAR = Grammar(
    tools=(("tool", CALL),), information=Tag("<tool_response>", "</tool_response>"),
    ends_at_eos=True,
)  # fmt: skip
"""The tags that rewards parse and that are neutralized in observations."""
PYTHON_TAG = "<|python_tag|>"
"""Token that Llama 3.x may write before a call."""
MARK = "\u2063policy turn\u2063"
"""Placeholder for the policy's turn when rendering the text that follows it."""
INSTRUCTION = (
    "Answer the question below. Call the tools as often as you need to. Once you know the answer, "
    "write just that between <answer> and </answer>. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
INVALID = (
    "That was neither a call of a tool nor an answer. Call a tool in the form that you were given, "
    "or write the final answer between <answer> and </answer>."
)


WORDING = TagFormat(NAME, INSTRUCTION, INVALID, GRAMMAR, item=ITEM_WITH_ID)
"""The texts that do not come from the chat template."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that native calls need."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class NativeFormat:
    """A `DialogueFormat` that uses the tokenizer's chat template."""

    tokenizer: ChatTokenizer
    tools: tuple[Tool, ...]
    wording: TagFormat = WORDING
    """The texts of the question, of feedback, and of each item in a tool message."""

    def __post_init__(self) -> None:
        """Raise ConfigError if the tokenizer's template does not support tools."""
        rendered = self.tokenizer.chat_template and self._render(
            [{"role": "user", "content": "?"}], tools=self.schemas
        )
        if not rendered or not all(tool.name in rendered for tool in self.tools):
            got = "a template that leaves tools out" if rendered else "a tokenizer without template"
            fix = "use an instruct model whose template supports tools, or template=search_r1"
            raise ConfigError(explain(f"template={NAME}", got, "a chat template with tools", fix))

    @property
    def name(self) -> str:
        return NAME

    @property
    def tags(self) -> Grammar:
        return self.wording.tags

    @property
    def stop(self) -> tuple[str, ...]:
        """Empty: a turn ends at the end of sequence."""
        return ()

    @property
    def closed_think(self) -> str:
        """A closed thinking part, as Qwen3's template writes it."""
        return "<think>\n\n</think>\n\n"

    @property
    def acts_in_think(self) -> bool:
        """False: calls follow the thinking part."""
        return False

    @property
    def marks_results(self) -> bool:
        """Whether the template encloses results in the information tags of the grammar."""
        turn = Turn((ToolCall(self.tools[0].name, {}),)) if self.tools else Turn()
        written = self.respond(turn, [()] * len(turn.calls), ())
        return not turn.calls or self.tags.information.opening in written

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools]

    def user_prompt(self, question: str) -> str:
        return self.wording.user_prompt(question)

    def parse(self, completion: Completion) -> Turn:
        """Return all calls of the turn, or its answer; see `DialogueFormat.parse`."""
        text = completion.text
        end = self.tokenizer.eos_token or ""
        is_open = completion.ids[-1:] != (self.tokenizer.eos_token_id,)
        contents = [text[start:end] for start, end in spans_between(text, CALL)]
        bare = text.strip().removesuffix(end).strip().removeprefix(PYTHON_TAG)
        if not contents and bare.startswith("{"):
            contents = [bare]
        parsed = [read_call(content) for content in contents]
        calls = tuple(call for call in parsed if call is not None)
        is_unbalanced = text.count(CALL.opening) != text.count(CALL.closing)
        is_malformed = is_unbalanced or None in parsed or GRAMMAR.information.opening in text
        # As rewards do, the last: a thought may quote the form.
        answers = [] if calls else answer_pattern(self.tags).findall(text)
        answer = answers[-1].strip() if answers else None
        return Turn(calls, answer, is_malformed or not (calls or answers), is_open)

    def respond(
        self, turn: Turn, results: Sequence[Sequence[Item]] | None, reserved: Sequence[str]
    ) -> str:
        """Return the tool messages, or feedback, up to the start of the policy's next turn."""
        if results is None:
            messages = [{"role": "user", "content": self.wording.invalid_action}]
        else:
            messages = [
                {"role": "tool", "name": call.tool, "content": self._content(items, reserved)}
                for call, items in zip(turn.calls, results, strict=True)
            ]
        text = self._render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *messages]
        )
        following = text.partition(MARK)[2]
        end = self.tokenizer.eos_token or ""
        # What the policy sampled to end its turn is in its segment, and is not written twice.
        return following if turn.is_open else following.removeprefix(end)

    def _content(self, items: Sequence[Item], reserved: Sequence[str]) -> str:
        return self.wording.items_text(items, reserved).rstrip("\n")

    def _render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        render = self.tokenizer.apply_chat_template
        return str(render(messages, tokenize=False, add_generation_prompt=True, **options))


def read_call(content: str) -> ToolCall | None:
    """Parse the JSON object of a call; return None if it is not a valid call."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None
