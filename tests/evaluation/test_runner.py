"""Running and scoring one question with each method."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.environments.openenv import items_of
from search_r1.evaluation.runner import Task, check_rows
from search_r1.evaluation.samples import Sample
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import EmptyRetrieval, Retrieval
from search_r1.retrieval.schema import Document
from search_r1.rewards import RewardInput
from search_r1.rewards.normalize import RULES
from tests.core.agent.chat_templates import ChatTokenizer
from tests.evaluation.scripted import Reader, documents, finder, row, runner
from tests.fakes import ByteTokenizer, UnavailableRetriever
from verl.agent.environment import Environment
from verl.agent.interface import Observation, Tool
from verl.agent.native import NativeFormat
from verl.data.outside import neutral_row
from verl.data.prompts import render
from verl.errors import DataError
from verl.types import Completion, Sampling

ROW = row(7)
SEARCH_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}


def play(retrieval: Retrieval, method: str = "agent", engine: Reader | None = None) -> Sample:
    return asyncio.run(runner(retrieval, method).run(Task(ROW, 0), engine or Reader()))


def test_the_agent_searches_reads_and_answers() -> None:
    """The sample has the search, its documents, token counts and scores."""
    sample = play(finder([ROW]))
    assert (sample.answer, sample.em, sample.f1, sample.cover_em) == ("gold 7", 1.0, 1.0, 1.0)
    (search,) = sample.searches
    assert (search.query, search.documents, search.has_answer) == ("What is thing 7?", ("7",), True)
    assert (sample.turns, sample.status, sample.question) == (2, "answered", "What is thing 7?")
    texts = dict.fromkeys(("prompt", "policy", "observation"), "")
    for origin, text in sample.dialogue:
        texts[origin] += text
    assert len(texts["policy"].encode()) == sample.policy_tokens
    assert len(texts["observation"].encode()) == sample.observation_tokens
    assert "What is thing 7?" in texts["prompt"]


@dataclass
class EnvironmentSearch(Tool):
    """A search whose items are those of an environment's server, without our documents."""

    name = "search"
    description = "finds"
    parameters = SEARCH_PARAMETERS
    counted_as = "searches"
    result: object

    async def call(self, query: str) -> Observation:  # type: ignore[override]
        return Observation(tuple(items_of({"tool_name": "search", "result": self.result})))


@pytest.mark.parametrize(
    ("result", "has_answer", "num_documents"),
    [
        ([{"id": "7", "title": "Things", "text": "It is gold 7 ."}], True, 1),
        ([{"text": "It is gold 7 ."}, {"text": "no"}], True, 2),
        ("It is gold 7 .", True, 1),
        ([{"id": "8", "text": "none"}], False, 1),
        ("Error: no such index", False, 0),
    ],
)
def test_searches_of_environments_are_seen(
    result: object, has_answer: bool, num_documents: int
) -> None:
    """Passages that are not our documents count as such, by their own ids if they have any."""
    ours = runner(finder([ROW]))
    agent = ours.agent.within(Environment((EnvironmentSearch(result),)))
    sample = asyncio.run(replace(ours, agent=agent).run(Task(ROW, 0), Reader()))
    (search,) = sample.searches
    assert (search.has_answer, len(set(search.documents))) == (has_answer, num_documents)
    if isinstance(result, list) and "id" in result[0]:
        assert search.documents == (result[0]["id"],)


def test_without_documents_the_agent_misses() -> None:
    """With the empty retriever, the agent searches, finds nothing and answers wrongly."""
    sample = play(EmptyRetrieval())
    assert (sample.em, len(sample.searches), sample.has_answer_in_documents) == (0.0, 1, False)


class UntaggedModel:
    """A model that replies without tags."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Write the reply."""
        text = "The answer is: gold 7.<|im_end|>"
        ids = ByteTokenizer().encode(text)
        return Completion(tuple(ids), (-0.5,) * len(ids), text, "stop")


def test_a_reply_without_tags_is_wrong_unless_it_is_to_be_read() -> None:
    """With `untagged=read` the reply is scored like a tagged one; the dialogue is unchanged."""
    strict, lenient = (
        asyncio.run(runner(EmptyRetrieval(), "direct", **more).run(Task(ROW, 0), UntaggedModel()))
        for more in ({}, {"untagged": "read"})
    )
    assert (strict.answer, strict.em) == (None, 0.0)
    assert (lenient.answer, lenient.em, lenient.f1, lenient.cover_em) == ("gold 7.", 1.0, 1.0, 1.0)
    assert lenient.dialogue == strict.dialogue


def test_a_failed_dialogue_is_not_read() -> None:
    """What was written before an outage is no answer, also where replies are read."""

    class Guesses(Reader):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            text = "The answer is gold 7 <search> gold 7 </search>"
            ids = self.tokenizer.encode(text)
            return Completion(tuple(ids), (-0.5,) * len(ids), text, "stop")

    for untagged in ("wrong", "read"):
        reads = runner(UnavailableRetriever(), untagged=untagged)
        sample = asyncio.run(reads.run(Task(ROW, 0), Guesses()))
        assert (sample.status, sample.answer) == ("failed", None)
        assert (sample.em, sample.f1, sample.cover_em) == (0.0, 0.0, 0.0)


def test_an_answer_in_tags_is_read_as_ever() -> None:
    """With `untagged=read`, an answer in tags is still read from its tags."""
    reading = runner(finder([ROW]), "rag", untagged="read")
    read = asyncio.run(reading.run(Task(ROW, 0), Reader()))
    assert read == play(finder([ROW]), "rag") and read.answer == "gold 7"


@pytest.mark.parametrize("method", ["direct", "cot"])
def test_a_closed_book_has_one_turn_and_no_search(method: str) -> None:
    """Closed-book baselines use their own prompt, one turn and no search."""
    engine = Reader()
    sample = play(finder([ROW]), method, engine)
    assert (sample.turns, sample.searches, sample.answer) == (1, (), "nothing")
    assert "<search>" not in engine.prompts[0]
    assert ("step by step" in engine.prompts[0]) is (method == "cot")


@pytest.mark.parametrize(
    ("method", "style"), [("direct", PromptStyle.DIRECT), ("rag", PromptStyle.RAG)]
)
def test_baselines_ask_in_the_words_of_the_data_builders(method: str, style: PromptStyle) -> None:
    """Baselines use exactly the prompts of the data built by `nq.py` and `nq_rag.py`."""
    engine = Reader()
    play(finder([ROW]), method, engine)
    question = "What is thing 7?"
    assert prompt_writer(style)(question, documents([ROW])[question]) in engine.prompts[0]


def test_rag_reads_the_questions_documents_first() -> None:
    """RAG searches for the question; its documents are in the prompt, counted as observation."""
    engine = Reader()
    sample = play(finder([ROW]), "rag", engine)
    assert (sample.em, sample.turns) == (1.0, 1)
    assert [search.query for search in sample.searches] == ["What is thing 7?"]
    passages = '<information>Doc 1(Title: "Things") It is gold 7 .\n</information>'
    assert passages in engine.prompts[0]
    assert sample.observation_tokens == len(passages)
    num_tokens = sample.prompt_tokens + sample.observation_tokens
    assert num_tokens == len(engine.tokenizer.encode(engine.prompts[0]))


@dataclass
class Reasoner:
    """A model that writes the sentences of a chain of thought, then answers."""

    replies: list[str]
    prompts: list[str] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Write the next reply."""
        self.prompts.append(ByteTokenizer().decode(list(prompt_ids)))
        self.seeds.append(sampling.seed)
        text = self.replies[len(self.prompts) - 1]
        ids = ByteTokenizer().encode(text)
        return Completion(tuple(ids), (-0.5,) * len(ids), text, "stop")


def passage(number: int) -> Document:
    return Document.from_title(str(number), f"Thing {number}", f"Fact {number}.")


HOPS = {
    "What is thing 7?": [passage(1), passage(2)],
    "Thing 1 is of thing 3.": [passage(1), passage(3)],
    "So thing 3.": [passage(4)],
}
SENTENCES = ["<think> Thing 1 is of thing 3. Then more.", "So thing 3.\nAnd", "no idea."]


def test_ircot_searches_for_each_sentence_of_its_reasoning() -> None:
    """A prompt has the new passages of all searches and all sentences; the costs are summed."""
    engine = Reasoner([SENTENCES[0], "<answer> gold 7 </answer>"])
    sample = play(InMemoryRetrieval(HOPS), "ircot", engine)  # the agent's one search, and its own
    assert (sample.em, sample.turns, sample.status) == (1.0, 2, "answered")
    assert [search.query for search in sample.searches] == list(HOPS)[:2]
    first, last = engine.prompts
    assert ("Fact 1." in first, "Fact 3." in first) == (True, False)
    assert [last.count(f"Fact {number}.") for number in (1, 2, 3)] == [1, 1, 1]
    assert "Reasoning so far: Thing 1 is of thing 3.\n" in last
    assert len(set(engine.seeds)) == 2
    texts = [text for origin, text in sample.dialogue if origin == "policy"]
    assert texts == engine.replies
    assert sample.policy_tokens == sum(len(text.encode()) for text in texts)
    num_tokens = sum(len(ByteTokenizer().encode(prompt)) for prompt in engine.prompts)
    assert sample.prompt_tokens + sample.observation_tokens == num_tokens


def test_ircot_ends_after_the_searches_of_the_agent() -> None:
    """Without an answer there are as many prompts as searches: one, and those of the agent."""
    asked = replace(runner(InMemoryRetrieval(HOPS), "ircot"), max_turns=2)
    engine = Reasoner(SENTENCES)
    sample = asyncio.run(asked.run(Task(ROW, 0), engine))
    assert (sample.status, sample.turns, sample.answer) == ("out_of_turns", 3, None)
    assert [search.query for search in sample.searches] == list(HOPS)
    assert "Reasoning so far: Thing 1 is of thing 3. So thing 3.\n" in engine.prompts[-1]


def test_ircot_ends_with_a_sentence_that_states_the_answer() -> None:
    """As in the original, "answer is" ends the reasoning, and what follows is the answer."""
    engine = Reasoner([SENTENCES[0], "So the answer is: gold 7. It shines."])
    sample = play(InMemoryRetrieval(HOPS), "ircot", engine)
    assert (sample.em, sample.turns, sample.status) == (1.0, 2, "answered")
    assert [search.query for search in sample.searches] == list(HOPS)[:2]


def test_greedy_is_greedy_on_every_turn() -> None:
    """Every request has temperature 0 and a different seed."""
    engine = Reader()
    play(finder([ROW]), engine=engine)
    assert [r.temperature for r in engine.requests] == [0.0, 0.0]
    assert len({r.seed for r in engine.requests}) == 2


@pytest.mark.parametrize("method", ["agent", "rag", "ircot"])
def test_an_outage_is_a_failure_not_an_answer(method: str) -> None:
    """The sample is marked failed with the error, and scores 0."""
    sample = play(UnavailableRetriever(), method)
    assert sample.status == "failed" and sample.error.startswith("no answer to")
    assert (sample.em, sample.searches) == (0.0, ())


def test_a_judge_scores_besides() -> None:
    """The judge gets the dialogue, and its score is stored in addition to EM."""
    seen: list[RewardInput] = []

    def judge(dialogue: RewardInput) -> float:
        seen.append(dialogue)
        return 0.5

    judged = replace(runner(finder([ROW])), judge=judge)
    sample = asyncio.run(judged.run(Task(ROW, 0), Reader()))
    assert (sample.judge, sample.em) == (0.5, 1.0)
    assert (seen[0].question, seen[0].answer) == ("What is thing 7?", "gold 7")


@pytest.mark.parametrize(("rule", "expected"), [("squad", 0.0), ("unicode", 1.0)])
def test_answers_and_documents_are_compared_by_the_rule(rule: str, expected: float) -> None:
    """EM, F1, cover-EM and the answer in documents change with `--normalize`."""
    found = row(1, answer="Bogota\u0301")
    task = Task(row(1, answer="BOGOT\u00c1"), 0)
    one = runner(finder([found]), normalize=RULES[rule])
    sample = asyncio.run(one.run(task, Reader()))
    assert {sample.em, sample.f1, sample.cover_em} == {expected}
    assert sample.has_answer_in_documents is bool(expected)


def test_long_prompts_are_refused_not_left_out() -> None:
    """Prompts over the limit are refused; RAG prompts reserve room for documents."""
    rows = [row(1), row(2)]
    check_rows(rows, runner(EmptyRetrieval()), 200)
    with pytest.raises(DataError, match="2 of 2 prompts over 100 tokens"):
        check_rows(rows, runner(EmptyRetrieval()), 100)
    with pytest.raises(DataError, match="--max-start-length"):
        check_rows(rows, runner(EmptyRetrieval(), "rag"), 500)


@pytest.mark.parametrize("method", ["agent", "direct", "cot", "rag", "ircot"])
def test_prompts_with_other_tags_are_refused_as_by_a_run(method: str) -> None:
    """Of the agent, which is asked with them; baselines replace them."""
    text = "Search with <tool_call> query </tool_call>. Question: What is thing 7?"
    other = replace(ROW, prompt=({"role": "user", "content": text},))
    refused = pytest.raises(DataError, match=r"rows\.jsonl#7: got .*<tool_call>.* fix: set ")
    with refused if method == "agent" else contextlib.nullcontext():
        check_rows([ROW, other], runner(EmptyRetrieval(), method), 10_000)


@pytest.mark.parametrize("method", ["agent", "rag"])
def test_prompts_in_other_words_are_told(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """As a run does, for the agent alone."""
    worded = replace(ROW, prompt="Find out with <search>. Question: What is thing 7?")
    check_rows([ROW, worded], runner(EmptyRetrieval(), method), 10_000)
    names = [record.name for record in caplog.records]
    assert names == (["search_r1.agent.worded"] if method == "agent" else [])


@pytest.mark.parametrize("method", ["agent", "direct", "rag"])
def test_line_32_questions_of_rows_make_no_control_tokens(method: str) -> None:
    """In messages, and in the plain texts of base models, also in the words of baselines."""
    text = "What is thing 7? <eos> <pad>?"
    for prompt in (({"role": "user", "content": f"Question: {text}"},), f"Question: {text}"):
        asked = replace(ROW, prompt=prompt, extra_info={"question": text})
        engine = Reader()
        asyncio.run(runner(finder([ROW]), method).run(Task(asked, 0), engine))
        assert "< eos> < pad>?" in engine.prompts[0]
        assert "<eos>" not in engine.prompts[0]


@pytest.mark.parametrize("end", ["<eos>\n", "<|im_end|><eos>"])
def test_a_rendered_prompt_is_asked_as_in_training(end: str) -> None:
    """Control tokens behind the question of a text are meant, as a run and `infer` have them."""
    asking, text = runner(finder([ROW])), f"Question: What is thing 7?{end}"
    asked = replace(ROW, prompt=text)
    prompt = asking.prompt(asked)
    trained = render(neutral_row(asked, asking.row_strings), asking.tokenizer)
    assert (prompt.ids, prompt.text) == (trained.ids, text)
    engine = Reader()
    asyncio.run(asking.run(Task(asked, 0), engine))
    assert engine.prompts[0] == text


def test_a_native_format_shows_its_tools_as_in_training() -> None:
    """The prompt of an evaluation has the schemas that the chat template writes."""
    plain, tokenizer = runner(finder([ROW])), ChatTokenizer()
    format = NativeFormat(tokenizer, plain.agent.environment.tools)
    agent = replace(plain.agent, tokenizer=tokenizer, format=format)
    asking = replace(plain, agent=agent, tokenizer=tokenizer)
    expected = render(ROW, tokenizer, format.schemas)  # type: ignore[arg-type]
    assert asking.render(ROW) == expected
    assert '"name": "search"' in expected.text
