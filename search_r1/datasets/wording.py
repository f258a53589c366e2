"""Wording of the prompts: for a searching agent, for direct answers, and for given documents.

The wording for search dialogues is in `search_r1.agent.tags`. The prompts of the two baselines,
which use the same tags, are defined here and also used by the evaluation. All of it is our own: it
asks for what the paper's prompts ask for, in other words, which a checkpoint trained elsewhere has
not seen (`search_r1.datasets.template` reads the wording that it saw).
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from search_r1.agent.tags import SEARCH_R1, WORDED, named_format
from search_r1.retrieval.schema import Document
from verl.agent import native
from verl.agent.wording import is_file
from verl.errors import ConfigError, explain

PromptWriter = Callable[[str, Sequence[Document]], str]
"""Makes the user's message from a question and the documents found for it (only used for RAG)."""

BASE = "base"
"""Name that the original scripts have for their only wording; here it is that of `SEARCH_R1`."""

DIRECT = (
    "Your task is to answer the question below. First reason about it between <think> and "
    "</think>, then write just the answer between <answer> and </answer>, without any "
    "explanation. For example, <answer> Beijing </answer>. "
)
RAG = (
    "Your task is to answer the question below. Passages that a search engine found for it stand "
    "between <information> and </information>; some of them may be of no use. First reason about "
    "question and passages between <think> and </think>, then write just the answer between "
    "<answer> and </answer>, without any explanation. For example, <answer> Beijing </answer>. "
)


class PromptStyle(StrEnum):
    """The source of facts that a prompt offers to the model."""

    SEARCH = "search"
    """The model may search."""
    DIRECT = "direct"
    """The model answers from memory."""
    RAG = "rag"
    """The prompt contains documents that were found for the question."""


def template_types(style: PromptStyle) -> list[str]:
    """Return the valid values of `--template_type`."""
    return [BASE, *WORDED, native.NAME] if style is PromptStyle.SEARCH else [BASE]


def prompt_writer(style: PromptStyle, template_type: str = BASE) -> PromptWriter:
    """Return the prompt writer of a style; raises ConfigError for an unknown `template_type`."""
    from_file = style is PromptStyle.SEARCH and is_file(template_type)
    if not from_file and template_type not in template_types(style):
        expected = f"one of {', '.join(template_types(style))}"
        fix = "leave it out for the default, or correct it"
        raise ConfigError(explain("--template_type", template_type, expected, fix))
    if style is PromptStyle.DIRECT:
        return lambda question, _: direct_prompt(question)
    if style is PromptStyle.RAG:
        return lambda question, found: rag_prompt(question, SEARCH_R1.observation(found))
    given = {BASE: SEARCH_R1, native.NAME: native.WORDING}
    template = given.get(template_type) or named_format(template_type)
    return lambda question, _: template.user_prompt(question)


def direct_prompt(question: str) -> str:
    return f"{DIRECT}Question: {question}\n"


def rag_prompt(question: str, observation: str) -> str:
    """Return a prompt with the passages, in the format of an observation, and the question."""
    return f"{RAG}{observation}Question: {question}\n"
