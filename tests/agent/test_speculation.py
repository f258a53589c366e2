"""Speculative searches: dialogues stay identical, and only answers to equal queries are used."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.agent.search import SearchTool
from search_r1.agent.speculation import (
    MAX_OPEN,
    OUTCOME_WINDOW,
    RETRY_EVERY,
    GroupSearches,
    QuestionPredictor,
    SpeculativeRetrieval,
)
from search_r1.agent.tags import TEMPLATES
from search_r1.rewards import build_reward
from search_r1.scoring import reward_input
from search_r1.search.backends.registry import build_retriever
from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverUnavailable
from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.schema import Document
from search_r1.search.server.app import create_app
from search_r1.search.settings import RetrieverConfig, ServiceConfig
from tests.apps import running
from tests.fakes import ByteTokenizer, RecitingEngine
from tests.search.conftest import write_corpus
from tests.search.server.fake_backends import SlowBackend
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.config.agent import ServerConfig
from verl.trainer.metrics import rollout_metrics
from verl.types import Prompt, Sampling, Trajectory, start_trajectory

NUM_GROUPS, NUM_SAMPLES = 12, 5
TOKENIZER = ByteTokenizer()
WORDS = ("Paris", "Lyon", "Vienna", "capital", "river", "Danube", "city", "France", "of", "the")


def dialogues() -> dict[str, tuple[Prompt, str, list[str]]]:
    """Return prompt, group and turns by name; dialogues of a group share some of their queries."""
    scripts = {}
    for group in range(NUM_GROUPS):
        dice = random.Random(group)
        question = " ".join(dice.choices(WORDS, k=4))
        known = [question, *(" ".join(dice.choices(WORDS, k=3)) for _ in range(2))]
        for sample in range(NUM_SAMPLES):
            name = f"{group}/{sample}"
            turns = []
            for _ in range(3):
                query = dice.choice([*known, " ".join(dice.choices(WORDS, k=5))])
                thought = " ".join(dice.choices(WORDS, k=8))
                turns.append(f"<think> {thought} </think> <search> {query} </search>")
            turns.insert(dice.randrange(4), dice.choice(["nothing", "<answer> Paris </answer>"]))
            ids = tuple(TOKENIZER.encode(f"{name}\n{question}"))
            extra = {"question": question}
            prompt = Prompt(name, ids, "test", ("Paris",), extra)
            scripts[name] = (prompt, f"1/{group}", [*turns, "<answer> Lyon </answer>"])
    return scripts


def play(url: str, speculate: bool) -> list[Trajectory]:
    """Run all dialogues concurrently."""
    scripts = dialogues()
    engine = RecitingEngine({name: turns for name, (_, _, turns) in scripts.items()}, 0.002)

    async def main() -> list[Trajectory]:
        async with RetrievalClient(url, 3) as client:
            options = ServerConfig(url, speculate=speculate)
            environment = Environment((SearchTool(client, options),))
            limits = Limits(max_turns=4, max_response_length=4096, max_prompt_length=1 << 16)
            agent = DialogueAgent(limits, TEMPLATES["short"], environment, TOKENIZER)
            starts = (
                start_trajectory(prompt, group=group, sample=n, seed=n)
                for n, (prompt, group, _) in enumerate(scripts.values())
            )
            runs = (agent.run(start, engine, Sampling(1)) for start in starts)
            return list(await asyncio.gather(*runs))

    done = asyncio.run(main())
    assert bool(engine.streams) == speculate
    return done


def test_dialogues_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """60 dialogues with a real server: equal ids, log-probs and rewards, with less waiting."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    build_index(BuildConfig("bm25", str(corpus), str(tmp_path / "built")))
    backend = build_retriever(RetrieverConfig("bm25", str(corpus), str(tmp_path / "built")))
    engine = SlowBackend(backend, lambda query: random.Random(query).random() / 10)
    with running(create_app(engine, ServiceConfig(cache_entries=0))) as url:
        plain = play(url, speculate=False)
        num_plain = len(engine.queries)
        ahead = play(url, speculate=True)
    assert len(plain) == NUM_GROUPS * NUM_SAMPLES >= 50
    for expected, speculative in zip(plain, ahead, strict=True):
        assert speculative.segments == expected.segments and speculative.status is expected.status
        assert speculative.faults == expected.faults and not expected.error
        assert {name: speculative.stats[name] for name in expected.stats} == expected.stats
    reward, tags = build_reward("em"), TEMPLATES["short"].tags
    scores, same = ([reward(reward_input(t, tags)) for t in ts] for ts in (plain, ahead))
    assert scores == same and len({output.score for output in scores}) == 2
    metrics = rollout_metrics(ahead)
    assert metrics["env/searches_ahead_used"] > 0 and metrics["env/searches_shared"] > 0
    waited, hidden = metrics["env/search_wait_s"], metrics["env/search_wait_hidden_s"]
    share = metrics["rollout/search_wait_hidden_share"]
    assert share == pytest.approx(hidden / (waited + hidden)) and 0.1 < share < 1
    assert "rollout/search_wait_hidden_share" not in rollout_metrics(plain)
    assert len(engine.queries) - num_plain < num_plain


@dataclass
class FakeClient:
    """A client that returns a document named after the query after a delay, or fails."""

    seconds: dict[str, float]
    failing: frozenset[str] = frozenset()
    can_prefetch: bool = True
    predicted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    max_open: int = 0
    _open: int = 0

    async def search(self, query: str, began: float | None = None) -> list[Document]:
        self.asked.append(query)
        await asyncio.sleep(self.seconds[query])
        return [Document.from_contents(query, query)]

    async def prefetch(self, query: str) -> list[Document]:
        self.predicted.append(query)
        self._open += 1
        self.max_open = max(self.max_open, self._open)
        try:
            await asyncio.sleep(self.seconds[query])
        finally:
            self._open -= 1
        if query in self.failing:
            raise RetrieverUnavailable("away")
        return [Document.from_contents(query, query)]


QUERY = st.sampled_from(["a", "a b", "a b c", "A", "b", "ab", ""])
STEP = st.tuples(st.sampled_from([0, 1]), st.booleans(), QUERY)


@settings(max_examples=150)
@given(
    steps=st.lists(STEP, max_size=14),
    ticks=st.fixed_dictionaries({q: st.integers(0, 2) for q in ["a", "a b", "a b c", "A", "b"]}),
    failing=st.frozensets(QUERY),
    has_room=st.booleans(),
)
def test_an_answer_is_that_of_an_equal_query(
    steps: list[tuple[int, bool, str]], ticks: dict[str, int], failing: frozenset[str],
    has_room: bool,
) -> None:  # fmt: skip
    """Holds for any predictions, dialogues, delays and failures; the number open is bounded."""
    seconds = {"ab": 0.0, "": 0.0} | {query: n / 1000 for query, n in ticks.items()}
    client = FakeClient(seconds, failing, has_room)
    group = GroupSearches()
    retrievals = [SpeculativeRetrieval(client, group) for _ in range(2)]  # type: ignore[arg-type]

    async def dialogue(number: int) -> None:
        for dialogue_number, is_predicted, query in steps:
            if dialogue_number != number:
                continue
            if is_predicted:
                retrievals[number].predict(query)
            else:
                documents = await retrievals[number].search(query)
                assert [document.contents for document in documents] == [query]

    async def main() -> None:
        await asyncio.gather(dialogue(0), dialogue(1))

    asyncio.run(main())
    searches = [query for _, is_predicted, query in steps if not is_predicted]
    assert client.max_open <= 2 * MAX_OPEN and (has_room or not client.predicted)
    assert not set(client.asked) - set(searches) and len(client.asked) <= len(searches)
    stats = Counter[str]()
    for retrieval in retrievals:
        stats.update(retrieval.stats())
    assert stats["searches_ahead"] == len(client.predicted)
    assert stats["searches_ahead_used"] <= len(set(client.predicted) & set(searches))


def test_hidden_seconds_are_counted() -> None:
    """A prediction sent 50 ms before its query, which takes 80 ms, hides 50 ms of the wait."""

    async def main() -> dict[str, float]:
        retrieval = SpeculativeRetrieval(FakeClient({"a": 0.08, "b": 0.0}), GroupSearches())  # type: ignore[arg-type]
        retrieval.predict("a")
        await asyncio.sleep(0.05)
        await retrieval.search("a")
        await retrieval.search("b")
        return retrieval.stats()

    stats = asyncio.run(main())
    assert 0.045 < stats["search_wait_hidden_s"] < 0.08 and stats["search_wait_s"] < 0.06
    assert (stats["searches_ahead"], stats["searches_ahead_used"]) == (1, 1)


def test_a_dialogue_has_few_predictions_open() -> None:
    """Predictions over the limit are not sent; an answered one frees its slot."""

    async def main() -> FakeClient:
        client = FakeClient({str(n): 0.01 for n in range(10)})
        retrieval = SpeculativeRetrieval(client, GroupSearches())  # type: ignore[arg-type]
        for n in range(8):
            retrieval.predict(str(n))
        await asyncio.sleep(0.05)
        retrieval.predict("9")
        await asyncio.sleep(0.02)
        return client

    assert asyncio.run(main()).predicted == [*map(str, range(MAX_OPEN)), "9"]


def test_a_question_that_is_never_searched_for_is_rarely_predicted() -> None:
    """After enough wrong predictions the question is rarely predicted, until one is right again."""
    client = FakeClient({str(n): 0.0 for n in range(100)})
    right = OUTCOME_WINDOW + RETRY_EVERY - 1

    async def main() -> None:
        predictor = QuestionPredictor()
        for n in range(right + 2):
            retrieval = SpeculativeRetrieval(client, GroupSearches())  # type: ignore[arg-type]
            prediction = predictor.predict(retrieval, str(n))
            await retrieval.search(str(n) if n == right else "other")
            predictor.record(prediction)

    client.seconds["other"] = 0.0
    asyncio.run(main())
    assert client.predicted == [*map(str, range(OUTCOME_WINDOW)), str(right), str(right + 1)]


def test_searches_of_a_group_are_dropped_with_its_last_dialogue() -> None:
    """Dialogues of a group share searches; without a group or the option, nothing is shared."""

    async def main() -> None:
        client = RetrievalClient("http://127.0.0.1:9")
        tool = SearchTool(client, ServerConfig(speculate=True))
        prompt = Prompt("x", (1,), "test", ())
        one, two, alone, other = (
            tool.for_dialogue(start_trajectory(prompt, group=group)) for group in ("g", "g", "", "")
        )
        groups = [t.retrieval.group for t in (one, two, alone, other)]  # type: ignore[attr-defined]
        assert groups[0] is groups[1] and groups[2] is not groups[3]
        assert list(tool._groups) == ["g"]
        del one, two, groups
        assert not tool._groups
        assert SearchTool(client).for_dialogue(start_trajectory(prompt)).retrieval is client
        await client.aclose()

    asyncio.run(main())
