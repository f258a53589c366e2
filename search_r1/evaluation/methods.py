"""How a question is put: to the agent, or to one of the baselines that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_r1.agent.grammar import SEARCH_R1
from search_r1.datasets.wording import direct_prompt, rag_prompt
from search_r1.inference.questions import question_of
from verl.agent.tags import TagFormat
from verl.data.rows import Row
from verl.errors import DataError, explain

_NO_SECOND_TURN = "\n\nNo answer was given.\n\n"

DIRECT = TagFormat(
    name="direct",
    instruction=direct_prompt("{question}"),
    invalid_action=_NO_SECOND_TURN,
    tags=SEARCH_R1,
)
"""Reasoning and the answer from memory, in the words of `scripts/data_process/nq.py`."""

COT = TagFormat(
    name="cot",
    instruction=(
        "Work out the answer to the question below from what you know. Reason step by step between "
        "<think> and </think>, then write just the answer between <answer> and </answer>. For "
        "example, <answer> Beijing </answer>. Question: {question}\n"
    ),
    invalid_action=_NO_SECOND_TURN,
    tags=SEARCH_R1,
)
"""Chain of thought: reasoning, then the answer, from memory."""

RAG = TagFormat(
    name="rag",
    instruction=rag_prompt("{question}", "\n\n{documents}\n\n"),
    invalid_action=_NO_SECOND_TURN,
    tags=SEARCH_R1,
)
"""Naive retrieval-augmented generation: the documents of the question, then reasoning, then the
answer, in the words of `scripts/data_process/nq_rag.py`."""


@dataclass(frozen=True)
class Method:
    """One way to get an answer."""

    name: str
    template: TagFormat | None = None
    """The wording of a baseline; None for the agent, whose prompt stands in the data."""
    needs_documents: bool = False
    """A retriever is asked."""

    @property
    def reads_first(self) -> bool:
        """The question's documents stand in the prompt."""
        return self.template is not None and self.needs_documents


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("agent", needs_documents=True),
        Method("direct", DIRECT),
        Method("cot", COT),
        Method("rag", RAG, needs_documents=True),
    )
}


def put(row: Row, method: Method, documents: str = "") -> Row:
    """The row as the method puts it, its question in `extra_info`.

    The agent's prompt stays as it is in the data. A baseline's takes its place, as a message or,
    for a row whose prompt is plain text, as text. Raises DataError when the question is unknown.
    """
    question = question_of(row)
    extra = {**row.extra_info, "question": question}
    if method.template is None:
        return replace(row, extra_info=extra)
    if not question:
        fix = "add the column extra_info.question, or a prompt that ends in «Question: …»"
        raise DataError(explain(f"question of {row.uid}", "none found", "a question", fix))
    text = method.template.user_prompt(question).replace("{documents}", documents)
    prompt = text if isinstance(row.prompt, str) else ({"role": "user", "content": text},)
    return replace(row, prompt=prompt, extra_info=extra)
