"""The dialogue's wording and grammar: prompts, actions, observations and feedback.

A policy turn ends at the first closing tag of `STOP`. `parse_action` reads what the turn asked
for; a `Template` words what the policy is told. Nothing here knows tokens or engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from search_r1.search.schema import Document

STOP = ("</search>", "</answer>")
"""What ends a policy turn."""

CLOSED_THINK = "<think>\n</think>\n"
"""A thinking part that is over before the policy starts (`no_think_rl`)."""

# An opening tag that is never closed does not swallow the next action.
_ACTION = re.compile(
    r"<search>(?P<search>(?:(?!<search>).)*?)</search>"
    r"|<answer>(?P<answer>(?:(?!<answer>).)*?)</answer>",
    re.DOTALL,
)
# Our tags, and the control tokens of the common chat formats, after their first character.
_RESERVED = re.compile(
    r"<(?=/?\s*(?:think|search|information|answer)\b"
    r"|\|"
    r"|/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)>)",
    re.IGNORECASE,
)


class ActionKind(StrEnum):
    """What a policy turn asks for."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True)
class Action:
    """One turn's request; `content` is the stripped query or answer, empty when invalid."""

    kind: ActionKind
    content: str = ""


def parse_action(text: str) -> Action:
    """Read the first closed `<search>` or `<answer>` of one turn's policy text.

    A search for nothing is invalid; an empty answer is an answer (and never a correct one).
    *Example*: `"<think> a </think> <search> b </search>"` is a search for `"b"`.
    """
    found = min(_ACTION.finditer(text), key=lambda match: match.end(), default=None)
    if found is None:
        return Action(ActionKind.INVALID)
    if found["answer"] is not None:
        return Action(ActionKind.ANSWER, found["answer"].strip())
    query = found["search"].strip()
    return Action(ActionKind.SEARCH, query) if query else Action(ActionKind.INVALID)


def neutralize(text: str, reserved: Iterable[str] = ()) -> str:
    """Break every tag, control token and string of `reserved` with a space, so none acts.

    Characters are only ever added, so no new tag can arise.
    *Example*: `"<answer>x"` becomes `"< answer>x"`.
    """
    text = _RESERVED.sub("< ", text)
    for token in reserved:
        if len(token) > 1:
            first, rest = re.escape(token[0]), re.escape(token[1:])
            text = re.sub(f"({first})(?={rest})", r"\1 ", text)
    return text


@dataclass(frozen=True)
class Template:
    """One wording of the dialogue; the tags are the same in all of them."""

    name: str
    instruction: str
    """The user's message; `{question}` stands for the question."""
    invalid_action: str
    """What the policy is told after a turn without an action."""
    stop: tuple[str, ...] = STOP
    closed_think: str = CLOSED_THINK

    def user_prompt(self, question: str) -> str:
        """The user's message for one question."""
        return self.instruction.replace("{question}", question.strip())

    def observation(self, documents: Sequence[Document], reserved: Iterable[str] = ()) -> str:
        """The passages between information tags, harmless whatever they contain.

        `reserved` are further strings to break: the special tokens of the policy's tokenizer.
        """
        reserved = tuple(reserved)
        passages = "".join(
            f'Doc {rank}(Title: "{neutralize(document.title, reserved)}") '
            f"{neutralize(document.text, reserved).strip()}\n"
            for rank, document in enumerate(documents, start=1)
        )
        return f"\n\n<information>{passages}</information>\n\n"


SEARCH_R1 = Template(
    name="search_r1",
    instruction=(
        "Your task is to answer the question below. Whenever you have received new information, "
        "first reason about it between <think> and </think>. If your reasoning shows that you are "
        "missing a fact, ask a search engine with <search> query </search>; its best results will "
        "be given to you between <information> and </information>. You are free to search as "
        "often as you like. Once nothing more needs to be looked up, write just the answer "
        "between <answer> and </answer>, without any explanation. For example, "
        "<answer> Beijing </answer>. Question: {question}\n"
    ),
    invalid_action=(
        "\n\nThat was not a valid action. To search, I have to write the query between <search> "
        "and </search>. To answer, I have to write the final answer between <answer> and "
        "</answer>. I will try once more.\n\n"
    ),
)
"""The instruction of the Search-R1 paper, in our words."""

SHORT = Template(
    name="short",
    instruction=(
        "Think in <think></think>, search with <search>query</search>, read <information>, "
        "finish with <answer>answer</answer>. Question: {question}"
    ),
    invalid_action="\n\nInvalid. Write <search> query </search> or <answer> answer </answer>.\n\n",
)
"""Few tokens, for small models that are fine-tuned on the format."""

TEMPLATES: dict[str, Template] = {template.name: template for template in (SEARCH_R1, SHORT)}
