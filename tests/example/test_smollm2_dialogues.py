"""Search dialogues by rule, over real BM25."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from example.model import load_tokenizer
from example.smollm2.dialogues import (
    Dialogue,
    first_query,
    make_dialogue,
    make_dialogues,
    second_query,
)
from example.smollm2.evidence import Words, find_evidence
from search_r1.agent.generation import search_agent
from search_r1.agent.grammar import SEARCH_R1
from search_r1.agent.tags import TEMPLATES
from search_r1.rewards.normalize import matches_exactly, normalize_answer
from search_r1.search.backends.bm25 import open_retriever
from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.retrieval import InMemoryRetrieval
from search_r1.search.schema import Document
from search_r1.search.settings import RetrieverConfig
from tests.example.smollm2_world import QUESTIONS, UNANSWERABLE, write_data
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.tags import read_turn
from verl.data.rows import Row
from verl.sft.demonstrations import load_demonstrations

TEMPLATE = TEMPLATES["short"]


class Bm25:
    """The server's BM25 in this process, as an agent asks it."""

    def __init__(self, folder: Path, topk: int) -> None:
        corpus = write_data(folder) / "corpus.jsonl"
        built = build_index(BuildConfig("bm25", str(corpus), str(folder / "index")))
        config = RetrieverConfig(corpus_path=str(corpus), index_path=str(built))
        self.engine = open_retriever(config)
        self.topk = topk

    async def search(self, query: str) -> list[Document]:
        return [hit.document for hit in self.engine.search([query], self.topk)[0]]


@pytest.fixture(scope="module")
def bm25(tmp_path_factory: pytest.TempPathFactory) -> Bm25:
    return Bm25(tmp_path_factory.mktemp("corpus"), topk=2)


def agent_over(retrieval: Bm25 | InMemoryRetrieval, max_obs_length: int = 448) -> DialogueAgent:
    limits = Limits(max_turns=2, max_obs_length=max_obs_length)
    return search_agent(retrieval, load_tokenizer(), limits, TEMPLATE)


def row_of(number: int, question: str, accepted: list[str]) -> Row:
    prompt = ({"role": "user", "content": TEMPLATE.user_prompt(question)},)
    return Row("train.parquet", number, prompt, "nq", tuple(accepted), {"question": question})


ROWS = [row_of(i, *pair) for i, pair in enumerate(QUESTIONS["train"])]


def solve(agent: DialogueAgent, rows: list[Row], seed: int = 0) -> list[Dialogue]:
    return asyncio.run(make_dialogues(rows, agent, seed))


def test_questions_with_a_hit_get_a_dialogue_and_no_others(bm25: Bm25) -> None:
    """A question whose answer no passage holds is left out; the order of the rows is kept."""
    made = solve(agent_over(bm25), ROWS)
    assert [d.row.number for d in made] == [n for n in range(len(ROWS)) if n not in UNANSWERABLE]


def test_observations_are_what_the_agent_shows(bm25: Bm25) -> None:
    """Each observation equals that of the agent's own retriever and trimming for the query."""
    agent = agent_over(bm25, max_obs_length=90)
    made = solve(agent, ROWS)
    assert made
    for dialogue in made:
        segments = list(dialogue.segments)
        assert [origin for origin, _ in segments[::2]] == ["policy"] * len(segments[::2])
        for (_, turn), (origin, observation) in zip(segments[::2], segments[1::2], strict=False):
            [call] = read_turn(turn, SEARCH_R1).calls
            assert origin == "observation"
            assert observation == asyncio.run(agent.consult(call))[1]
            assert len(agent.tokenizer.encode(observation, add_special_tokens=False)) <= 90


def test_answers_are_correct_and_copied_from_what_is_shown(bm25: Bm25) -> None:
    """The last turn is an answer that scores, and stands verbatim in the last observation."""
    for dialogue in solve(agent_over(bm25), ROWS):
        *_, (_, observation), (_, last) = dialogue.segments
        answer = read_turn(last, SEARCH_R1).answer
        assert answer is not None
        assert matches_exactly(answer, dialogue.row.ground_truth)
        assert answer in observation


def test_a_second_search_follows_a_title() -> None:
    """Where the first documents lack the answer, one of their titles leads the second query."""
    question = "where was the founder of Maple Harbour born?"
    town = Document.from_title("0", "Ada Quill", "Founder of Maple Harbour, a merchant.")
    birth = Document.from_title("1", "Ada Quill", "The founder was born in Dunmere.")
    hop = second_query(question, "Ada Quill")
    assert hop == "Ada Quill where founder Maple Harbour born"
    known = {q: [town] for q in (question.rstrip("?"), "where founder Maple Harbour born")}
    agent = agent_over(InMemoryRetrieval({**known, hop: [birth]}))
    made = asyncio.run(make_dialogue(row_of(0, question, ["Dunmere"]), agent, random.Random(0)))
    assert made is not None
    assert [search.query for search in made.searches][1:] == [hop]
    assert "Ada Quill" in made.searches[1].thought
    assert made.evidence.answer == "Dunmere"


def test_the_seed_alone_decides(bm25: Bm25) -> None:
    """The same seed makes the same dialogues whatever rows surround a question."""
    agent = agent_over(bm25)
    whole = [dialogue.record() for dialogue in solve(agent, ROWS)]
    assert [d.record() for d in solve(agent, ROWS[:3])] == whole[:3]
    assert [d.record() for d in solve(agent, ROWS, seed=1)] != whole


def test_supervised_training_reads_them(bm25: Bm25, tmp_path: Path) -> None:
    """The rows load as demonstrations whose policy and observation texts are the dialogue's."""
    made = solve(agent_over(bm25), ROWS)
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(dialogue.record()) + "\n" for dialogue in made))
    loaded = load_demonstrations(str(file), load_tokenizer(), 2048)
    for trajectory, dialogue in zip(loaded, made, strict=True):
        found = [(segment.origin.name.lower(), segment.text) for segment in trajectory.segments[1:]]
        assert found == list(dialogue.segments)


@pytest.mark.parametrize("text", [
    "It was the U.S.A., he said", "a  An apple, the 'Pear'!", "about 4.3 km2 (see below).",
])  # fmt: skip
def test_words_compare_as_the_reward_does(text: str) -> None:
    """Word by word the normalisation is that of the reward on the whole text."""
    assert " ".join(word for word in Words.of(text).compared if word) == normalize_answer(text)


def test_evidence_is_the_best_supported_place() -> None:
    """The mention amid the question's key words wins; half words never."""
    documents = [
        Document.from_title("0", "Rivers", "Leftover maps. Turn left at the inn."),
        Document.from_title(
            "1", "Jake Rosholt", "He won. Rosholt punches hard with his left hand."
        ),
    ]
    found = find_evidence("With which hand does Rosholt throw punches?", documents, ["the left"])
    assert found is not None
    assert (found.rank, found.answer) == (2, "left")
    assert find_evidence("With which hand?", documents[:1], ["map"]) is None
    assert find_evidence("With which hand?", documents, ["the"]) is None


def test_queries_are_the_question_or_its_key_words() -> None:
    """Both kinds occur, and neither has a question mark or a stop word of its own."""
    queries = {first_query("who founded the town of Varn?", random.Random(s)) for s in range(20)}
    assert queries == {"who founded the town of Varn", "who founded town Varn"}
