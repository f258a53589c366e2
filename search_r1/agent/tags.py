"""Built-in dialogue templates for search: prompts, observations and feedback."""

from pathlib import Path

from search_r1.agent import grammar
from verl.agent import native, wording
from verl.agent.tags import TagFormat
from verl.errors import ConfigError, explain

SEARCH_R1 = TagFormat(
    name="search_r1",
    tags=grammar.SEARCH_R1,
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
"""The paper's tags with an instruction of our own, which its published checkpoints did not see."""

SHORT = TagFormat(
    name="short",
    tags=grammar.SEARCH_R1,
    instruction=(
        "Think in <think></think>, search with <search>query</search>, read <information>, "
        "finish with <answer>answer</answer>. Question: {question}"
    ),
    invalid_action="\n\nInvalid. Write <search> query </search> or <answer> answer </answer>.\n\n",
)
"""A short prompt for small models that are fine-tuned on the format."""

R1_SEARCHER = TagFormat(
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
"""The dialogue of R1-Searcher (Song et al. 2025): its tags with our own wording."""

TEMPLATES: dict[str, TagFormat] = {
    template.name: template for template in (SEARCH_R1, SHORT, R1_SEARCHER)
}

PLAIN = "tools"
"""Name of the template that is generated from the tools' descriptions."""
FILES = {"search_r1_zh": Path(__file__).with_name("search_r1_zh.yaml")}
"""Built-in templates that are read when they are named, as the files of users are."""
WORDED = (*TEMPLATES, *FILES)
"""Names of the built-in templates with a wording of their own, for which data can be built."""
NAMES = (*WORDED, PLAIN, native.NAME)
"""Names of all built-in templates."""


def named_format(template: str) -> TagFormat:
    """Return a built-in format, or load one from a YAML file. Raises ConfigError."""
    if wording.is_file(template) or template in FILES:
        return wording.read_format(FILES.get(template, template))
    if template not in TEMPLATES:
        expected = f"one of {', '.join(NAMES)}, or a .yaml file"
        raise ConfigError(explain("template", template, expected, "name one"))
    return TEMPLATES[template]
