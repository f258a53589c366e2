"""Playing one question to its end, by the training loop's agent or a baseline, and scoring it."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from search_r1.agent.grammar import SEARCH_R1, Grammar, tag_pattern
from search_r1.datasets.wording import direct_prompt, rag_prompt
from search_r1.evaluation.options import READ, WRONG
from search_r1.evaluation.samples import Sample, Search
from search_r1.inference.dialogue import query_of, question_of
from search_r1.rewards import RewardInput, build_reward
from search_r1.rewards.normalize import normalize_answer
from search_r1.scoring import reward_input
from search_r1.search.schema import Document
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import Observation, ToolCall
from verl.agent.tags import TagFormat
from verl.data import Tokenizer, render
from verl.data.rows import Row
from verl.errors import DataError, ToolError, explain
from verl.rollout.interface import RolloutEngine
from verl.types import Origin, Sampling, Status, Trajectory, start_trajectory

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


Judge = Callable[[RewardInput], float | None]
"""The score of a dialogue; None where no verdict is to be had."""
_SCORES = build_reward("f1")
"""Gives EM, F1 and cover-EM as components."""


@dataclass(frozen=True)
class Task:
    row: Row
    sample: int

    @property
    def key(self) -> tuple[str, int]:
        return self.row.uid, self.sample


def holds(text: str, accepted: Sequence[str]) -> bool:
    """Whether an accepted answer stands in the text in whole words, both normalised."""
    words = f" {normalize_answer(text)} "
    return any(gold and f" {gold} " in words for gold in map(normalize_answer, accepted))


def agent_of(agent: DialogueAgent, method: Method) -> DialogueAgent:
    """The agent itself, or for a baseline one that has a single turn and cannot search in it."""
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
    """Plays tasks by one method."""

    agent: DialogueAgent
    method: Method
    tokenizer: Tokenizer
    sampling: Sampling
    seed: int = 0
    judge: Judge | None = None
    untagged: str = WRONG
    """What is made of a reply without an answer in tags."""

    async def play(self, task: Task, engine: RolloutEngine) -> Sample:
        """One finished and scored dialogue; a failed search makes a failed one."""
        searches = list[Search]()

        def heard(call: ToolCall, observation: Observation) -> None:
            if call.tool == "search":
                found = [i.source for i in observation.items if isinstance(i.source, Document)]
                text, ids = "\n".join(one.contents for one in found), tuple(one.id for one in found)
                has_answer = holds(text, task.row.ground_truth)
                searches.append(Search(query_of(call), ids, has_answer))

        environment = replace(self.agent.environment, on_observation=heard)
        agent = replace(self.agent, environment=environment)
        row, num_read = put(task.row, self.method), 0
        problem: str | None = None
        if self.method.reads_first:
            try:
                _, words = await agent.consult(ToolCall("search", row.extra_info["question"]))
                documents = words.strip()
                num_read = len(self.tokenizer.encode(documents, add_special_tokens=False))
                row = put(task.row, self.method, documents)
            except ToolError as error:
                problem = str(error)
        seed = derived_seed(self.seed, *task.key)
        end = start_trajectory(render(row, self.tokenizer), sample=task.sample, seed=seed)
        if problem is not None:
            end.status, end.error = Status.FAILED, problem
        else:
            end = await agent.run(end, engine, self.sampling)
        return await self._scored(end, searches, num_read)

    async def _scored(self, end: Trajectory, searches: Sequence[Search], num_read: int) -> Sample:
        question = str(end.prompt.extra_info["question"])
        tags = self.agent.format.tags
        dialogue = replace(reward_input(end, tags), question=question)
        if self.untagged == READ and dialogue.answer is None and dialogue.policy_texts:
            *before, last = dialogue.policy_texts
            answer = tags.answer.wrap(read_answer(last, tags))
            dialogue = replace(dialogue, policy_texts=[*before, answer])
        scores = _SCORES(dialogue).components
        judged = None
        if self.judge is not None and end.status is not Status.FAILED:
            # A judge may ask a server; the event loop must stay free for the dialogues.
            judged = await asyncio.to_thread(self.judge, dialogue)
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
            prompt_tokens=end.num_tokens_of(Origin.PROMPT) - num_read,
            policy_tokens=end.num_policy_tokens,
            observation_tokens=end.num_tokens_of(Origin.OBSERVATION) + num_read,
            dialogue=tuple(dialogue.segments),
            judge=judged,
            error=end.error,
        )


def check_rows(rows: Sequence[Row], runner: Runner, limit: int) -> None:
    """Raise DataError for prompts over `limit` tokens, since every row is scored."""
    method = runner.method
    room = runner.agent.limits.max_obs_length if method.reads_first else 0
    put_rows = (put(row, method) for row in rows)
    prompts = (render(row, runner.tokenizer, limit=limit) for row in put_rows)
    lengths = {prompt.uid: len(prompt.ids) for prompt in prompts}
    overlong = [uid for uid, length in lengths.items() if length + room > limit]
    if overlong:
        longest = max(lengths.values()) + room
        got = f"{len(overlong)} of {len(rows)} prompts over {limit} tokens: {overlong[0]} ..."
        fix = f"--max-start-length {longest} or more; every row is scored, so none is left out"
        raise DataError(explain("--max-start-length", got, "prompts that fit", fix))


_CONTROL = re.compile(r"<\|[^|<>]*\|>")
"""What ends a message, and the like."""
_LEAD = re.compile(r".*\banswer\b[^.\n]*?(?:\bis\b|:)\s*:?\s*(?=\S)", re.IGNORECASE | re.DOTALL)
"""Up to the last "the answer is", "answer:", "the answer to this question is:"."""


def read_answer(reply: str, tags: Grammar) -> str:
    """What the reply says the answer is ("The answer is: Oslo."), else all but its thinking."""
    opening, closing = map(re.escape, (tags.think.opening, tags.think.closing))
    spoken = re.sub(f"{opening}.*?{closing}", " ", reply, flags=re.DOTALL)
    spoken = _CONTROL.sub(" ", tag_pattern(tags).sub(" ", spoken)).strip()
    lead = _LEAD.match(spoken)
    return spoken[lead.end() :].partition("\n")[0].strip() if lead else spoken
