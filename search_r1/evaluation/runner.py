"""Runs one question with the training loop's agent or a baseline, and scores the dialogue."""

import asyncio
import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from search_r1.agent.documents_first import DocumentsFirst, known_question
from search_r1.agent.generation import check_prompts
from search_r1.agent.grammar import Grammar, spans_between, tag_pattern
from search_r1.agent.question import question_of
from search_r1.agent.search import documents_of, holds_answer
from search_r1.evaluation.methods import Method, apply_method
from search_r1.evaluation.options import READ, WRONG
from search_r1.evaluation.samples import Sample, SampleSearch
from search_r1.inference.dialogue import observed, query_of
from search_r1.rewards import RewardInput, build_reward
from search_r1.rewards.normalize import Normalize, normalize_answer
from search_r1.scoring import reward_input
from verl.agent.control import ControlStrings
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import Observation, ToolCall
from verl.data.outside import neutral_row, strings_of_rows
from verl.data.prompts import Tokenizer, render
from verl.data.rows import Row
from verl.engine import RolloutEngine
from verl.errors import DataError, ToolError, explain
from verl.types import Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

Judge = Callable[[RewardInput], float | None]
"""A function that scores a dialogue; None if there is no verdict."""
_SCORES = build_reward("f1")
"""Reward whose components are EM, F1 and cover-EM."""
SUMMED = ("turns", "truncated_turns")
"""Statistics that are summed over the prompts of a dialogue."""


@dataclass(frozen=True)
class Task:
    """One dialogue to run: a row, and the number of its sample from 0."""

    row: Row
    sample: int

    @property
    def key(self) -> tuple[str, int]:
        return self.row.uid, self.sample


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
    max_turns: int = 2
    """Searches that the agent may have; a method that interleaves has them after its first."""

    async def run(self, task: Task, engine: RolloutEngine) -> Sample:
        """Run and score one dialogue; a failed search gives a failed sample."""
        searches = list[SampleSearch]()

        def record(call: ToolCall, observation: Observation) -> None:
            if call.tool == "search":
                documents = documents_of(observation)
                ids = tuple(document.id for document in documents)
                has_answer = holds_answer(documents, task.row.ground_truth, self.normalize)
                searches.append(SampleSearch(query_of(call), ids, has_answer))

        agent = observed(self.agent, record)
        began = time.perf_counter()
        play = self._interleave if self.method.interleaves else self._play
        try:
            end, num_document_tokens = await play(task, agent, engine)
        except ToolError as error:
            end, num_document_tokens = self._start(task), 0
            end.fail(str(error))
        seconds = time.perf_counter() - began
        sample = await self._score(end, searches, num_document_tokens)
        return replace(sample, seconds=seconds)

    async def _play(
        self, task: Task, agent: DialogueAgent, engine: RolloutEngine
    ) -> tuple[Trajectory, int]:
        """Run one dialogue; returns it with the number of its prompt's tokens that are documents.

        Raises ToolError if the search for the documents of the prompt fails.
        """
        documents = ""
        if self.method.searches_first:
            _, text = await agent.consult(ToolCall("search", question_of(task.row)))
            documents = text.strip()
        end = await agent.run(self._start(task, documents), engine, self.sampling)
        return end, self._num_tokens(documents)

    async def _interleave(
        self, task: Task, agent: DialogueAgent, engine: RolloutEngine
    ) -> tuple[Trajectory, int]:
        """As `_play`, but search for the question, then for each sentence of the reasoning.

        Every sentence is sampled from a prompt with all passages and sentences so far; the
        trajectory has these prompts and what was sampled from them, one after the other. As in the
        original, a sentence that states the answer ("So the answer is Oslo.") ends the dialogue.
        """
        query, known, num_document_tokens = question_of(task.row), set[object](), 0
        shown, thoughts, steps = list[str](), list[str](), list[Trajectory]()
        for number in range(self.method.num_searches(self.max_turns)):
            call = ToolCall("search", query)
            observation = await agent.environment.call(call)
            new = [item for item in observation.items if item.id is None or item.id not in known]
            known |= {item.id for item in new}
            if new or not shown:
                shown.append(agent.shown(call, new).strip())
            documents = "\n".join(shown)
            num_document_tokens += self._num_tokens(documents)
            start = self._start(task, documents, " ".join(thoughts), number)
            steps.append(await agent.run(start, engine, self.sampling))
            if steps[-1].status is not Status.OUT_OF_TURNS:
                break
            sentence = first_sentence(steps[-1].text, agent.format.tags)
            if _stated(sentence) is not None:
                steps[-1].status = Status.ANSWERED
                break
            query = sentence or query
            thoughts.append(query)
        end = steps[-1]
        segments = [segment for step in steps for segment in step.segments]
        counts = {name: sum(step.stats[name] for step in steps) for name in SUMMED}
        end.stats = {**end.stats, **counts}
        return replace(end, segments=segments), num_document_tokens

    def _start(
        self, task: Task, documents: str = "", thoughts: str = "", number: int = 0
    ) -> Trajectory:
        """Return a trajectory with the method's prompt; `number` counts prompts of a dialogue."""
        prompt = self.prompt(task.row, documents, thoughts)
        seed = derived_seed(self.seed, *task.key)
        if number:
            seed = derived_seed(seed, f"prompt {number}")
        return start_trajectory(prompt, sample=task.sample, seed=seed)

    def _num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @functools.cached_property
    def row_strings(self) -> ControlStrings:
        """Control tokens that rows may not contain."""
        return strings_of_rows(self.tokenizer, self.agent.format.tags)

    def prompt(
        self, row: Row, documents: str = "", thoughts: str = "", limit: int = sys.maxsize
    ) -> Prompt:
        """Render the method's prompt for a row, with the question in `extra_info`.

        Raises DataError if a baseline's question is unknown.
        """
        asked = apply_method(row, self.method, documents, thoughts)
        if self.method.template is not None:
            return self.render(asked, limit)
        # The row as it is: a run breaks up control tokens of a question that it has, not of one
        # that was found in a prompt, whose own tokens may follow it.
        return replace(self.render(row, limit), extra_info=asked.extra_info)

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
        is_stated = self.method.interleaves and end.status is Status.ANSWERED
        is_failed = end.status is Status.FAILED  # what it wrote before an outage is no answer
        is_read = (self.untagged == READ or is_stated) and not is_failed
        if is_read and dialogue.answer is None and dialogue.policy_texts:
            *earlier, last = dialogue.policy_texts
            text = first_sentence(last, tags) if is_stated else last
            answer = tags.answer.wrap(read_untagged_answer(text, tags))
            dialogue = replace(dialogue, policy_texts=[*earlier, answer])
        scores = _SCORES(dialogue).components
        judge_score = None
        if self.judge is not None and not is_failed:
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
    """Raise DataError if a prompt, with room for its documents, is longer than `limit` tokens.

    The same if the agent needs a question that a row does not have, or if a run of the agent would
    refuse the prompt's tags; warns of another wording.
    """
    method = runner.method
    num_reserved = runner.agent.limits.max_obs_length * method.num_searches(runner.max_turns)
    prompts = [runner.prompt(row, limit=limit) for row in rows]
    if isinstance(runner.agent, DocumentsFirst):
        for prompt in prompts:
            known_question(prompt)
    if method.template is None:  # the others replace the prompts of the rows
        check_prompts(runner.agent.format, prompts)
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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_ANSWER = re.compile(r"\banswer\b", re.IGNORECASE)
_STATES = re.compile(r"\bis\b|:", re.IGNORECASE)


def read_untagged_answer(reply: str, tags: Grammar) -> str:
    """Return the stated answer ("The answer is: Oslo."), or else the reply without its thinking."""
    kept, last = [], 0
    for start, end in spans_between(reply, tags.think):
        kept.append(reply[last : start - len(tags.think.opening)])
        last = end + len(tags.think.closing)
    text = _without_tags(" ".join([*kept, reply[last:]]), tags)
    statement = _stated(text)
    return text if statement is None else statement.partition("\n")[0].strip()


def first_sentence(reply: str, tags: Grammar) -> str:
    """Return the first sentence of a reply, without tags and control tokens; may be empty."""
    return _SENTENCE_END.split(_without_tags(reply, tags), maxsplit=1)[0].strip()


def _without_tags(text: str, tags: Grammar) -> str:
    return _CONTROL.sub(" ", tag_pattern(tags).sub(" ", text)).strip()


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
