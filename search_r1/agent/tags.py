"""The dialogue's wording and grammar: prompts, actions, observations and feedback.

A policy turn ends at the first closing tag of the grammar's `stop`. `parse_action` reads what the
turn asked for; a `Template` words what the policy is told and says which tags count. Nothing here
knows tokens or engines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from search_r1.agent import grammar
from search_r1.agent.grammar import Grammar, action_pattern
from search_r1.search.schema import Document


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


def parse_action(text: str, tags: Grammar = grammar.SEARCH_R1) -> Action:
    """Read the first closed search or answer of one turn's policy text.

    A search for nothing is invalid; an empty answer is an answer (and never a correct one).
    *Example*: `"<think> a </think> <search> b </search>"` is a search for `"b"`.
    """
    found = action_pattern(tags).search(text)
    if found is None:
        return Action(ActionKind.INVALID)
    if found["answer"] is not None:
        return Action(ActionKind.ANSWER, found["answer"].strip())
    query = found["search"].strip()
    return Action(ActionKind.SEARCH, query) if query else Action(ActionKind.INVALID)


def neutralize(text: str, reserved: Iterable[str] = (), tags: Grammar = grammar.SEARCH_R1) -> str:
    """Break every tag, control token and string of `reserved` with a space, so none acts.

    Characters are only ever added, so no new tag can arise.
    *Example*: `"<answer>x"` becomes `"< answer>x"`.
    """
    pattern, others = _reserved(tags)
    text = pattern.sub("< ", text)
    for token in (*others, *reserved):
        if len(token) > 1:
            first, rest = re.escape(token[0]), re.escape(token[1:])
            text = re.sub(f"({first})(?={rest})", r"\1 ", text)
    return text


@functools.cache
def _reserved(tags: Grammar) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """The `<` that opens a tag or a control token of the common chat formats, and other tags."""
    texts = [text for tag in tags.tags for text in (tag.opening, tag.closing)]
    named = [re.fullmatch(r"</?(\w+)>", text) for text in texts]
    names = "|".join(dict.fromkeys(re.escape(found[1]) for found in named if found))
    pattern = re.compile(
        rf"<(?=/?\s*(?:{names})\b"
        r"|\|"
        r"|/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)>)",
        re.IGNORECASE,
    )
    unnamed = (text for text, found in zip(texts, named, strict=True) if not found)
    return pattern, tuple(text for text in unnamed if not text.startswith("<|"))


@dataclass(frozen=True)
class Template:
    """One wording of the dialogue, and the tags that it names."""

    name: str
    instruction: str
    """The user's message; `{question}` stands for the question."""
    invalid_action: str
    """What the policy is told after a turn without an action."""
    tags: Grammar = grammar.SEARCH_R1

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a policy turn."""
        return self.tags.stop

    @property
    def closed_think(self) -> str:
        """A thinking part that is over before the policy starts (`no_think_rl`)."""
        return self.tags.think.wrap("\n") + "\n"

    def user_prompt(self, question: str) -> str:
        """The user's message for one question."""
        return self.instruction.replace("{question}", question.strip())

    def observation(self, documents: Sequence[Document], reserved: Iterable[str] = ()) -> str:
        """The passages between information tags, harmless whatever they contain.

        `reserved` are further strings to break: the special tokens of the policy's tokenizer.
        """
        reserved = tuple(reserved)
        passages = "".join(
            f'Doc {rank}(Title: "{neutralize(document.title, reserved, self.tags)}") '
            f"{neutralize(document.text, reserved, self.tags).strip()}\n"
            for rank, document in enumerate(documents, start=1)
        )
        return f"\n\n{self.tags.information.wrap(passages)}\n\n"


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

R1_SEARCHER = Template(
    name="r1_searcher",
    tags=grammar.R1_SEARCHER,
    instruction=(
        "A question follows. Think it through between <think> and </think>, and after that give "
        "just the answer between <answer> and </answer>, such as <answer> Beijing </answer>. "
        "Wherever a fact is missing while you think, look it up: write a few keywords about one "
        "fact as <|begin_of_query|> keywords <|end_of_query|>, and what was found will be put "
        "between <|begin_of_documents|> and <|end_of_documents|> for you to go on thinking from. "
        "Question: {question}\n"
    ),
    invalid_action=(
        "\n\nThat was neither a query nor an answer. A query stands between <|begin_of_query|> "
        "and <|end_of_query|>; the answer stands between <answer> and </answer>, once </think> "
        "is written. Going on.\n\n"
    ),
)
"""The dialogue of R1-Searcher (Song et al. 2025): its tags, in our words."""

TEMPLATES: dict[str, Template] = {
    template.name: template for template in (SEARCH_R1, SHORT, R1_SEARCHER)
}
