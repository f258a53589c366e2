"""Rule-based search dialogues with a real BM25 index."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from example.model import load_tokenizer
from example.smollm2.dialogues import (
    Dialogue,
    make_dialogues,
)
from example.smollm2.facts import compared
from example.smollm2.names import mentioned, names_in
from example.smollm2.split import selected
from search_r1.agent.generation import search_agent
from search_r1.agent.grammar import SEARCH_R1
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.engines.bm25 import open_retriever
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.schema import Document
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.rewards.normalize import contains, matches_exactly, normalize_answer
from tests.example.smollm2_world import PASSAGES, QUESTIONS, UNANSWERABLE, write_data
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.tags import read_turn
from verl.data.rows import Row
from verl.ext.sft.demonstrations import load_demonstrations

TEMPLATE = TEMPLATES["short"]


class Bm25:
    """The BM25 backend in this process, with the interface that agents use."""

    def __init__(self, folder: Path, topk: int) -> None:
        corpus = write_data(folder) / "corpus.jsonl"
        index = build_index(BuildConfig("bm25", str(corpus), str(folder / "index")))
        config = RetrieverConfig(corpus_path=str(corpus), index_path=str(index))
        self.backend = open_retriever(config)
        self.topk = topk

    async def search(self, query: str) -> list[Document]:
        return [hit.document for hit in self.backend.search([query], self.topk)[0]]


@pytest.fixture(scope="module")
def bm25(tmp_path_factory: pytest.TempPathFactory) -> Bm25:
    return Bm25(tmp_path_factory.mktemp("corpus"), topk=2)


def agent_with(retrieval: Bm25 | InMemoryRetrieval, max_obs_length: int = 448) -> DialogueAgent:
    limits = Limits(max_turns=2, max_obs_length=max_obs_length)
    return search_agent(retrieval, load_tokenizer(), limits, TEMPLATE)


def row_of(number: int, question: str, accepted: list[str]) -> Row:
    prompt = ({"role": "user", "content": TEMPLATE.user_prompt(question)},)
    return Row("train.parquet", number, prompt, "nq", tuple(accepted), {"question": question})


ROWS = [row_of(i, *pair) for i, pair in enumerate(QUESTIONS["train"])]


def solve(agent: DialogueAgent, rows: list[Row], seed: int = 0) -> list[Dialogue]:
    titles = {normalize_answer(answer): {normalize_answer(title) for title, text in PASSAGES.items()
              if contains(normalize_answer(text), normalize_answer(answer))}
              for row in rows for answer in row.ground_truth}  # fmt: skip
    return asyncio.run(make_dialogues(rows, agent, seed, titles))


def test_only_answerable_questions_get_a_dialogue(bm25: Bm25) -> None:
    """A question whose answer is in no passage is skipped; the order of the rows is kept."""
    dialogues = solve(agent_with(bm25), ROWS)
    answerable = [number for number in range(len(ROWS)) if number not in UNANSWERABLE]
    assert [dialogue.row.number for dialogue in dialogues] == answerable


def test_observations_equal_those_of_the_agent(bm25: Bm25) -> None:
    """Each observation equals that of the agent for the same query, truncation included."""
    agent = agent_with(bm25, max_obs_length=90)
    dialogues = solve(agent, ROWS)
    assert dialogues
    for dialogue in dialogues:
        segments = list(dialogue.segments)
        assert [origin for origin, _ in segments[::2]] == ["policy"] * len(segments[::2])
        for (_, turn), (origin, observation) in zip(segments[::2], segments[1::2], strict=False):
            [call] = read_turn(turn, SEARCH_R1).calls
            assert origin == "observation"
            assert observation == asyncio.run(agent.consult(call))[1]
            assert len(agent.tokenizer.encode(observation, add_special_tokens=False)) <= 90


def test_answers_are_correct_and_in_the_observation(bm25: Bm25) -> None:
    """The last turn is a correct answer that occurs verbatim in the last observation."""
    for dialogue in solve(agent_with(bm25), ROWS):
        *_, (_, observation), (_, last) = dialogue.segments
        answer = read_turn(last, SEARCH_R1).answer
        assert answer is not None
        assert matches_exactly(answer, dialogue.row.ground_truth)
        assert answer in observation


def test_dialogues_load_as_demonstrations(bm25: Bm25, tmp_path: Path) -> None:
    """Policy and observation texts of the loaded demonstrations equal those of the dialogues."""
    dialogues = solve(agent_with(bm25), ROWS)
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(dialogue.record()) + "\n" for dialogue in dialogues))
    loaded = load_demonstrations(str(file), load_tokenizer(), 2048)
    for trajectory, dialogue in zip(loaded, dialogues, strict=True):
        segments = [(part.origin.name.lower(), part.text) for part in trajectory.segments[1:]]
        assert segments == list(dialogue.segments)


@pytest.mark.parametrize(
    ("question", "accepted", "queries", "answer"),
    [
        ("Where was the founder of Maple Harbour born?", ["Dunmere"], ["Ada Quill"], "Dunmere"),
        ("Are Teal Bridge and Silver Kite both bridges?", ["no"], [], "no"),
    ],
)
def test_second_queries_and_comparisons(
    question: str, accepted: list[str], queries: list[str], answer: str, bm25: Bm25
) -> None:
    """A linked page is searched by its name as the passage writes it; two pages are compared."""
    retrieval = Bm25.__new__(Bm25)
    retrieval.backend, retrieval.topk = bm25.backend, 1 if queries else 2
    for seed in range(4):
        [dialogue] = solve(agent_with(retrieval), [row_of(0, question, accepted)], seed)
        assert [s.query for s in dialogue.searches[1:]] == queries
        assert all(query in dialogue.searches[0].observation for query in queries)
        assert dialogue.answer == answer


@pytest.mark.parametrize(
    ("question", "texts", "accepted", "expected"),
    [
        ("Who was born first?", ("born 1932", "born 1911 - 1950"), ["Bo"], "Al: 1932. Bo: 1911."),
        ("Who was born first?", ("born 1932", "born 1911"), ["Al"], None),
        ("Who is younger?", ("born 1932", "born 1911"), ["Al"], "Al: 1932. Bo: 1911."),
        ("Have they the same nationality?", ("a German", "an American"), ["no"],
         "Al: German. Bo: American."),
        ("Have they the same nationality?", ("a German", "an American"), ["yes"], None),
        ("Who is taller?", ("born 1932", "born 1911"), ["Al"], None),
    ],
)  # fmt: skip
def test_compared_facts_lead_to_the_answer(
    question: str, texts: tuple[str, str], accepted: list[str], expected: str | None
) -> None:
    """A thought states years or nationalities only where these give an accepted answer."""
    pages = {n: Document.from_title(n, n, t) for n, t in zip(("Al", "Bo"), texts, strict=True)}
    assert compared(question, pages, accepted) == expected


def test_names_are_as_written() -> None:
    """Names of a question, and mentions in a text, keep their case and inner words."""
    assert names_in("Are Alexander Kluge and Bank of China from the same country?") == [
        "Alexander Kluge", "Bank of China"]  # fmt: skip
    text = "It was built by Ada Quill, of the ada quill family, near Varn."
    assert list(mentioned(text, {"ada quill", "varn", "it"})) == ["Ada Quill", "Varn"]


def test_select_is_the_same_in_any_order() -> None:
    """The rows split off depend on the questions alone; equal questions stay together."""
    questions = [f"Who is number {n}?" for n in range(50)] + ["who is number 3"]
    chosen = {
        q for q, is_chosen in zip(questions, selected(questions, 10), strict=True) if is_chosen
    }
    backwards = questions[::-1]
    again = {
        q for q, is_chosen in zip(backwards, selected(backwards, 10), strict=True) if is_chosen
    }
    assert chosen == again and len({normalize_answer(q) for q in chosen}) == 10
    assert (questions[3] in chosen) == (questions[50] in chosen)
