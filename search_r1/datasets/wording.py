"""What a question becomes: the user's message with searching, without, or with documents given.

The wording of dialogues that search is that of `search_r1.agent.tags`; here are the two
prompts of the baselines, which ask for the same tags and are those of evaluation too.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from search_r1.agent.tags import SEARCH_R1, TEMPLATES
from search_r1.search.schema import Document
from verl.agent import native
from verl.agent.wording import is_file, read_format
from verl.errors import ConfigError, explain

PromptWriter = Callable[[str, Sequence[Document]], str]
"""Makes the user's message from a question and the documents found for it (none but for RAG)."""

BASE = "base"
"""The name that the original scripts give to their one wording."""

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
    """How a prompt lets the model come by its facts."""

    SEARCH = "search"
    """The model searches when it wants to."""
    DIRECT = "direct"
    """From memory only."""
    RAG = "rag"
    """From documents that were found for the question beforehand."""


def template_types(style: PromptStyle) -> list[str]:
    """The names that `--template_type` may have."""
    return [BASE, *TEMPLATES, native.NAME] if style is PromptStyle.SEARCH else [BASE]


def prompt_writer(style: PromptStyle, template_type: str = BASE) -> PromptWriter:
    """The wording of a style. Raises ConfigError for a name that it does not have."""
    from_file = style is PromptStyle.SEARCH and is_file(template_type)
    if not from_file and template_type not in template_types(style):
        expected = f"one of {', '.join(template_types(style))}"
        fix = "leave it out for the paper's, or correct it"
        raise ConfigError(explain("--template_type", template_type, expected, fix))
    if style is PromptStyle.DIRECT:
        return lambda question, _: direct_prompt(question)
    if style is PromptStyle.RAG:
        return lambda question, found: rag_prompt(question, SEARCH_R1.observation(found))
    known = {BASE: SEARCH_R1, native.NAME: native.WORDING, **TEMPLATES}
    template = read_format(template_type) if from_file else known[template_type]
    return lambda question, _: template.user_prompt(question)


def direct_prompt(question: str) -> str:
    return f"{DIRECT}Question: {question}\n"


def rag_prompt(question: str, observation: str) -> str:
    """The passages as an agent would see them, then the question."""
    return f"{RAG}{observation}Question: {question}\n"
