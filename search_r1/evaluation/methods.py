"""Ways to answer questions in an evaluation: the agent, and baselines with prompts of their own."""

import re
from dataclasses import dataclass, replace

from search_r1.agent.grammar import SEARCH_R1
from search_r1.agent.question import question_of
from search_r1.datasets.wording import direct_prompt, rag_prompt
from verl.agent.dialogue import DialogueAgent
from verl.agent.tags import TagFormat
from verl.data.rows import Row
from verl.errors import DataError, explain

DIRECT = TagFormat(
    name="direct",
    instruction=direct_prompt("{question}"),
    invalid_action="\n\nNo answer was given.\n\n",  # a baseline has no second turn
    tags=SEARCH_R1,
)
"""Baseline: reasoning and answer from memory, with the prompt of `scripts/data_process/nq.py`."""

COT = replace(
    DIRECT,
    name="cot",
    instruction=(
        "Work out the answer to the question below from what you know. Reason step by step between "
        "<think> and </think>, then write just the answer between <answer> and </answer>. For "
        "example, <answer> Beijing </answer>. Question: {question}\n"
    ),
)
"""Baseline: chain of thought, then the answer, from memory."""

RAG = replace(DIRECT, name="rag", instruction=rag_prompt("{question}", "\n\n{documents}\n\n"))
"""Baseline: naive retrieval-augmented generation, with the documents for the question in the
prompt, which is that of `scripts/data_process/nq_rag.py`."""

IRCOT = replace(
    DIRECT,
    name="ircot",
    instruction=(
        "Your task is to answer the question below, one sentence at a time. Passages that a search "
        "engine found stand between <information> and </information>; some of them may be of no "
        "use. Write the next sentence of your reasoning, which is searched for next. As soon as "
        "passages and reasoning suffice, write just the answer between <answer> and </answer> "
        "instead. For example, <answer> Beijing </answer>.\n\n{documents}\n\n"
        "Question: {question}\nReasoning so far: {thoughts}\n"
    ),
)
"""Baseline: each sentence of the reasoning is the next search (Trivedi et al. 2023, IRCoT)."""


@dataclass(frozen=True)
class Method:
    """A way to answer questions: the agent or a baseline."""

    template: TagFormat | None = None
    """The prompt template of a baseline; None for the agent, which uses the prompts of the data."""
    needs_documents: bool = False
    """Whether a retriever is used."""
    interleaves: bool = False
    """Whether each sentence of the reasoning is searched for, in addition to the question."""

    @property
    def searches_first(self) -> bool:
        """Whether documents for the question are searched first and put into the prompt."""
        return self.template is not None and self.needs_documents

    def num_searches(self, max_turns: int) -> int:
        """Return how many searches' documents a prompt holds, if a dialogue may have `max_turns`.

        A method that interleaves searches for the question and then as often as the agent may.
        """
        return (1 + max_turns if self.interleaves else 1) if self.searches_first else 0


METHODS = {
    "agent": Method(needs_documents=True),
    "direct": Method(DIRECT),
    "cot": Method(COT),
    "rag": Method(RAG, needs_documents=True),
    "ircot": Method(IRCOT, needs_documents=True, interleaves=True),
}


def apply_method(row: Row, method: Method, documents: str = "", thoughts: str = "") -> Row:
    """Return the row with the method's prompt, and with the question in `extra_info`.

    The agent keeps the prompt of the data. A baseline replaces it with its own, as a message or, if
    the row's prompt is plain text, as text. Raises DataError if a baseline's question is unknown.
    """
    question = question_of(row)
    extra = {**row.extra_info, "question": question}
    if method.template is None:
        return replace(row, extra_info=extra)
    if not question:
        fix = "add the column extra_info.question, or a prompt that ends in «Question: …»"
        raise DataError(explain(f"question of {row.uid}", "none found", "a question", fix))
    texts = {"question": question, "documents": documents, "thoughts": thoughts}
    # One pass, since these texts may contain placeholders.
    places = r"\{(question|documents|thoughts)\}"
    text = re.sub(places, lambda place: texts[place[1]], method.template.instruction)
    prompt = text if isinstance(row.prompt, str) else ({"role": "user", "content": text},)
    return replace(row, prompt=prompt, extra_info=extra)


def method_agent(agent: DialogueAgent, method: Method) -> DialogueAgent:
    """Return the agent itself, or for a baseline an agent with a single turn and no tools."""
    if method.template is None:
        return agent
    return replace(
        agent,
        limits=replace(agent.limits, max_turns=0),
        format=method.template,
        environment=replace(agent.environment, enabled=False),
    )
