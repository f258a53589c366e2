"""One question played and scored, by each method."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.evaluation.runner import Task, check_rows, holds
from search_r1.evaluation.samples import Sample
from search_r1.rewards import RewardInput
from search_r1.search.client import Document, EmptyRetrieval, Retrieval
from search_r1.search.errors import RetrieverUnavailable
from tests.evaluation.worlds import Reader, documents, finder, row, runner
from tests.fakes import ByteTokenizer
from verl.agent.dialogue import derived_seed
from verl.errors import DataError
from verl.types import Completion, Sampling

ROW = row(7)


def play(retrieval: Retrieval, method: str = "agent", engine: Reader | None = None) -> Sample:
    return asyncio.run(runner(retrieval, method).play(Task(ROW, 0), engine or Reader()))


def test_the_agent_searches_reads_and_answers() -> None:
    """Its search, what it found, its tokens and its scores."""
    found = play(finder([ROW]))
    assert (found.answer, found.em, found.f1, found.cover_em) == ("gold 7", 1.0, 1.0, 1.0)
    (one,) = found.searches
    assert (one.query, one.documents, one.has_answer) == ("What is thing 7?", ("7",), True)
    assert (found.turns, found.status, found.question) == (2, "answered", "What is thing 7?")
    texts = dict.fromkeys(("prompt", "policy", "observation"), "")
    for origin, text in found.dialogue:
        texts[origin] += text
    assert len(texts["policy"].encode()) == found.policy_tokens
    assert len(texts["observation"].encode()) == found.observation_tokens
    assert "What is thing 7?" in texts["prompt"]


def test_without_documents_the_agent_misses() -> None:
    """The empty retriever: a search, no hit, a wrong answer."""
    found = play(EmptyRetrieval())
    assert (found.em, len(found.searches), found.has_answer_in_documents) == (0.0, 1, False)


class Plain:
    """A model that was never taught the tags."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply."""
        text = "The answer is: gold 7.<|im_end|>"
        ids = ByteTokenizer().encode(text)
        return Completion(tuple(ids), (-0.5,) * len(ids), text, "stop")


def test_a_reply_without_tags_is_wrong_unless_it_is_to_be_read() -> None:
    """Read, it scores as the same words in tags do; the dialogue is kept as it was."""
    strict, lenient = (
        asyncio.run(runner(EmptyRetrieval(), "direct", **more).play(Task(ROW, 0), Plain()))
        for more in ({}, {"untagged": "read"})
    )
    assert (strict.answer, strict.em) == (None, 0.0)
    assert (lenient.answer, lenient.em, lenient.f1, lenient.cover_em) == ("gold 7.", 1.0, 1.0, 1.0)
    assert lenient.dialogue == strict.dialogue


def test_an_answer_in_tags_is_read_as_ever() -> None:
    """Where there are tags, nothing is made of the rest of the reply."""
    reading = runner(finder([ROW]), "rag", untagged="read")
    read = asyncio.run(reading.play(Task(ROW, 0), Reader()))
    assert read == play(finder([ROW]), "rag") and read.answer == "gold 7"


@pytest.mark.parametrize("method", ["direct", "cot"])
def test_a_closed_book_has_one_turn_and_no_search(method: str) -> None:
    """The baseline's own words stand in the prompt, the agent's do not."""
    engine = Reader()
    found = play(finder([ROW]), method, engine)
    assert (found.turns, found.searches, found.answer) == (1, (), "nothing")
    assert "<search>" not in engine.prompts[0]
    assert ("step by step" in engine.prompts[0]) is (method == "cot")


@pytest.mark.parametrize(
    ("method", "style"), [("direct", PromptStyle.DIRECT), ("rag", PromptStyle.RAG)]
)
def test_baselines_ask_in_the_words_of_the_data_builders(method: str, style: PromptStyle) -> None:
    """A model trained on `nq.py`'s or `nq_rag.py`'s rows is evaluated on the same bytes."""
    engine = Reader()
    play(finder([ROW]), method, engine)
    question = "What is thing 7?"
    assert prompt_writer(style)(question, documents([ROW])[question]) in engine.prompts[0]


def test_rag_reads_the_questions_documents_first() -> None:
    """One search for the question itself; its documents stand in the prompt and are counted."""
    engine = Reader()
    found = play(finder([ROW]), "rag", engine)
    assert (found.em, found.turns, [s.query for s in found.searches]) == (
        1.0,
        1,
        ["What is thing 7?"],
    )
    passages = '<information>Doc 1(Title: "Things") It is gold 7 .\n</information>'
    assert passages in engine.prompts[0]
    assert found.observation_tokens == len(passages)
    whole = found.prompt_tokens + found.observation_tokens
    assert whole == len(engine.tokenizer.encode(engine.prompts[0]))


def test_greedy_is_greedy_on_every_turn() -> None:
    """Each request has temperature 0, and a seed of its own."""
    engine = Reader()
    play(finder([ROW]), engine=engine)
    assert [r.temperature for r in engine.requests] == [0.0, 0.0]
    assert len({r.seed for r in engine.requests}) == 2


class Broken:
    """A retriever that is away."""

    async def search(self, query: str) -> list[Document]:
        raise RetrieverUnavailable("away")


@pytest.mark.parametrize("method", ["agent", "rag"])
def test_an_outage_is_a_failure_not_an_answer(method: str) -> None:
    """The dialogue is marked failed with its reason, and scores nothing."""
    found = play(Broken(), method)
    assert (found.status, found.error, found.em, found.searches) == ("failed", "away", 0.0, ())


def test_a_judge_scores_besides() -> None:
    """It sees question, gold answers and answer; EM stays as it is."""
    seen: list[RewardInput] = []

    def judge(dialogue: RewardInput) -> float:
        seen.append(dialogue)
        return 0.5

    one = replace(runner(finder([ROW])), judge=judge)
    found = asyncio.run(one.play(Task(ROW, 0), Reader()))
    assert (found.judge, found.em) == (0.5, 1.0)
    assert (seen[0].question, seen[0].answer) == ("What is thing 7?", "gold 7")


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("He knows it.", "no", False),
        ("The answer: No!", "no", True),
        ("born in The U.S.A.", "usa", True),
        ("1984", "198", False),
        ("New York City", "York City", True),
        ("anything", "The", False),
    ],
)
def test_an_answer_stands_in_whole_words(text: str, answer: str, found: bool) -> None:
    """Normalised as EM is; an answer of nothing stands nowhere."""
    assert holds(text, [answer]) is found


def test_seeds_do_not_depend_on_the_order_of_rows() -> None:
    """Each dialogue has its own, by evaluation seed, row and sample."""
    seeds = {derived_seed(s, uid, k) for s in (0, 1) for uid in ("a#1", "a#2") for k in (0, 1)}
    assert len(seeds) == 8
    assert derived_seed(0, "a#1", 1) == derived_seed(0, "a#1", 1)


def test_long_prompts_are_refused_not_left_out() -> None:
    """Every row is scored: too long ones are counted, rag's with room for documents."""
    rows = [row(1), row(2)]
    check_rows(rows, runner(EmptyRetrieval()), 200)
    with pytest.raises(DataError, match="2 of 2 prompts over 100 tokens"):
        check_rows(rows, runner(EmptyRetrieval()), 100)
    with pytest.raises(DataError, match="--max-start-length"):
        check_rows(rows, runner(EmptyRetrieval(), "rag"), 500)
