"""Runs one question with the training loop's agent or a baseline, and scores the dialogue."""

import asyncio
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from search_r1.agent.grammar import SEARCH_R1, Grammar, spans_between, tag_pattern
from search_r1.datasets.wording import direct_prompt, rag_prompt
from search_r1.evaluation.options import READ, WRONG
from search_r1.evaluation.samples import Sample, SampleSearch
from search_r1.inference.dialogue import query_of, question_of
from search_r1.retrieval.schema import Document
from search_r1.rewards import RewardInput, build_reward
from search_r1.rewards.normalize import Normalize, contains_answer, normalize_answer
from search_r1.scoring import reward_input
from verl.agent.control import ControlStrings
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import Observation, ToolCall
from verl.agent.tags import TagFormat
from verl.data.outside import neutral_row, strings_of_rows
from verl.data.prompts import Tokenizer, render
from verl.data.rows import Row
from verl.errors import DataError, ToolError, explain
from verl.rollout.interface import RolloutEngine
from verl.types import Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

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


@dataclass(frozen=True)
class Method:
    """A way to answer questions: the agent or a baseline."""

    template: TagFormat | None = None
    """The prompt template of a baseline; None for the agent, which uses the prompts of the data."""
    needs_documents: bool = False
    """Whether a retriever is used."""

    @property
    def searches_first(self) -> bool:
        """Whether documents for the question are searched first and put into the prompt."""
        return self.template is not None and self.needs_documents


METHODS = {"agent": Method(needs_documents=True), "direct": Method(DIRECT), "cot": Method(COT),
           "rag": Method(RAG, needs_documents=True)}  # fmt: skip


def apply_method(row: Row, method: Method, documents: str = "") -> Row:
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
    texts = {"{question}": question, "{documents}": documents}  # which may contain placeholders
    text = re.sub(r"\{(question|documents)\}", lambda m: texts[m[0]], method.template.instruction)
    prompt = text if isinstance(row.prompt, str) else ({"role": "user", "content": text},)
    return replace(row, prompt=prompt, extra_info=extra)


Judge = Callable[[RewardInput], float | None]
"""A function that scores a dialogue; None if there is no verdict."""
_SCORES = build_reward("f1")
"""Reward whose components are EM, F1 and cover-EM."""


@dataclass(frozen=True)
class Task:
    """One dialogue to run: a row, and the number of its sample from 0."""

    row: Row
    sample: int

    @property
    def key(self) -> tuple[str, int]:
        return self.row.uid, self.sample


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


@dataclass(frozen=True)
class Runner:
    """Runs and scores tasks with one method."""

    agent: DialogueAgent
    method: Method
    tokenizer: Tokenizer
    sampling: Sampling
    seed: int = 0
    judge: Judge | None = None
    untagged: str = WRONG
    """How a reply without an answer in tags is scored: WRONG or READ."""
    normalize: Normalize = normalize_answer
    """The rule by which answers are compared."""

    async def run(self, task: Task, engine: RolloutEngine) -> Sample:
        """Run and score one dialogue; a failed search gives a failed sample."""
        searches = list[SampleSearch]()

        def record(call: ToolCall, observation: Observation) -> None:
            if call.tool == "search":
                documents = [i.source for i in observation.items if isinstance(i.source, Document)]
                text = "\n".join(document.contents for document in documents)
                ids = tuple(document.id for document in documents)
                has_answer = contains_answer(text, task.row.ground_truth, self.normalize)
                searches.append(SampleSearch(query_of(call), ids, has_answer))

        environment = replace(self.agent.environment, on_observation=record)
        agent = replace(self.agent, environment=environment)
        row = apply_method(task.row, self.method)
        num_document_tokens = 0
        problem: str | None = None
        if self.method.searches_first:
            try:
                _, text = await agent.consult(ToolCall("search", row.extra_info["question"]))
                documents = text.strip()
                ids = self.tokenizer.encode(documents, add_special_tokens=False)
                num_document_tokens = len(ids)
                row = apply_method(task.row, self.method, documents)
            except ToolError as error:
                problem = str(error)
        seed = derived_seed(self.seed, *task.key)
        end = start_trajectory(self.render(row), sample=task.sample, seed=seed)
        if problem is not None:
            end.status, end.error = Status.FAILED, problem
        else:
            end = await agent.run(end, engine, self.sampling)
        return await self._score(end, searches, num_document_tokens)

    @functools.cached_property
    def row_strings(self) -> ControlStrings:
        """Control tokens that rows may not contain."""
        return strings_of_rows(self.tokenizer, self.agent.format.tags)

    def render(self, row: Row, limit: int = sys.maxsize) -> Prompt:
        """Render a row as training does, with the tools of the format."""
        safe = neutral_row(row, self.row_strings)
        return render(safe, self.tokenizer, self.agent.format.schemas, limit)

    async def _score(
        self, end: Trajectory, searches: Sequence[SampleSearch], num_document_tokens: int
    ) -> Sample:
        """Score a dialogue; `num_document_tokens` of its prompt count as observation tokens."""
        question = str(end.prompt.extra_info["question"])
        tags = self.agent.format.tags
        dialogue = replace(reward_input(end, tags, self.normalize), question=question)
        if self.untagged == READ and dialogue.answer is None and dialogue.policy_texts:
            *earlier, last = dialogue.policy_texts
            answer = tags.answer.wrap(read_untagged_answer(last, tags))
            dialogue = replace(dialogue, policy_texts=[*earlier, answer])
        scores = _SCORES(dialogue).components
        judge_score = None
        if self.judge is not None and end.status is not Status.FAILED:
            # The judge may wait for a server, which must not block the event loop.
            judge_score = await asyncio.to_thread(self.judge, dialogue)
        stats = end.stats
        return Sample(
            uid=end.prompt.uid,
            sample=end.sample,
            data_source=end.prompt.data_source,
            question=dialogue.question,
            ground_truth=tuple(end.prompt.ground_truth),
            status=end.status.value,
            answer=dialogue.answer,
            em=scores["em"],
            f1=scores["f1"],
            cover_em=scores["cover_em"],
            searches=tuple(searches),
            turns=int(stats.get("turns", 0)),
            invalid_actions=int(stats.get("invalid_actions", 0)),
            truncated_turns=int(stats.get("truncated_turns", 0)),
            prompt_tokens=end.num_tokens_of(Origin.PROMPT) - num_document_tokens,
            policy_tokens=end.num_policy_tokens,
            observation_tokens=end.num_tokens_of(Origin.OBSERVATION) + num_document_tokens,
            dialogue=tuple(dialogue.segments),
            judge=judge_score,
            error=end.error,
        )


def check_rows(rows: Sequence[Row], runner: Runner, limit: int) -> None:
    """Raise DataError if a prompt, with room for its documents, is longer than `limit` tokens."""
    method = runner.method
    num_reserved = runner.agent.limits.max_obs_length if method.searches_first else 0
    worded_rows = (apply_method(row, method) for row in rows)
    prompts = (runner.render(row, limit) for row in worded_rows)
    lengths = {prompt.uid: len(prompt.ids) for prompt in prompts}
    overlong = [uid for uid, length in lengths.items() if length + num_reserved > limit]
    if overlong:
        longest = max(lengths.values()) + num_reserved
        got = f"{len(overlong)} of {len(rows)} prompts over {limit} tokens: {overlong[0]} ..."
        fix = f"--max-start-length {longest} or more; every row is scored, so none is left out"
        raise DataError(explain("--max-start-length", got, "prompts that fit", fix))


_CONTROL = re.compile(r"<\|[^|<>]*\|>")
"""Control tokens, such as the end of a message."""
_SENTENCE = re.compile(r"[^.\n]+")
_ANSWER = re.compile(r"\banswer\b", re.IGNORECASE)
_STATES = re.compile(r"\bis\b|:", re.IGNORECASE)


def read_untagged_answer(reply: str, tags: Grammar) -> str:
    """Return the stated answer ("The answer is: Oslo."), or else the reply without its thinking."""
    kept, last = [], 0
    for start, end in spans_between(reply, tags.think):
        kept.append(reply[last : start - len(tags.think.opening)])
        last = end + len(tags.think.closing)
    text = " ".join([*kept, reply[last:]])
    text = _CONTROL.sub(" ", tag_pattern(tags).sub(" ", text)).strip()
    statement = _stated(text)
    return text if statement is None else statement.partition("\n")[0].strip()


def _stated(text: str) -> str | None:
    """Return what follows the last "the answer is", "answer:" or "the answer to this question is:".

    The word and the verb or colon are in one sentence. None without such words, or at the very end.
    """
    for sentence in reversed(list(_SENTENCE.finditer(text))):
        span = sentence.span()
        marks = [mark for mark in _STATES.finditer(text, *span) if mark.end() < len(text)]
        words = [w for w in _ANSWER.finditer(text, *span) if marks and w.end() <= marks[-1].start()]
        if words:
            end = next(mark.end() for mark in marks if mark.start() >= words[-1].end())
            statement = text[end:].lstrip()
            rest = statement.removeprefix(":").lstrip()
            return rest or statement
    return None
