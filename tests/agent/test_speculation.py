"""Searches sent ahead: the same dialogues to the last bit, and only answers of equal queries."""

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
from search_r1.agent.speculation import EVERY, MOST_OPEN, NUM_QUESTIONS, Foresight, Group, Questions
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
from tests.search.server.engines import Slow
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.config.agent import ServerConfig
from verl.trainer.metrics import rollout_metrics
from verl.types import Prompt, Sampling, Trajectory, start_trajectory

NUM_GROUPS, NUM_SAMPLES = 12, 5
TOKENIZER = ByteTokenizer()
WORDS = ("Paris", "Lyon", "Vienna", "capital", "river", "Danube", "city", "France", "of", "the")


def dialogues() -> dict[str, tuple[Prompt, str, list[str]]]:
    """By name: the prompt, its group, and the turns; siblings sometimes ask alike."""
    found = {}
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
            found[name] = (prompt, f"1/{group}", [*turns, "<answer> Lyon </answer>"])
    return found


def play(url: str, speculate: bool) -> list[Trajectory]:
    """Every dialogue, at once."""
    played = dialogues()
    engine = RecitingEngine({name: turns for name, (_, _, turns) in played.items()}, 0.002)

    async def main() -> list[Trajectory]:
        async with RetrievalClient(url, 3) as client:
            options = ServerConfig(url, speculate=speculate)
            environment = Environment((SearchTool(client, options),))
            limits = Limits(max_turns=4, max_response_length=4096, max_prompt_length=1 << 16)
            agent = DialogueAgent(limits, TEMPLATES["short"], environment, TOKENIZER)
            starts = (
                start_trajectory(prompt, group=group, sample=n, seed=n)
                for n, (prompt, group, _) in enumerate(played.values())
            )
            runs = (agent.run(start, engine, Sampling(1)) for start in starts)
            return list(await asyncio.gather(*runs))

    done = asyncio.run(main())
    assert bool(engine.streams) == speculate
    return done


def test_dialogues_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """60 dialogues over a server on a port: ids, log-probs, rewards; fewer searches, less wait."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    build_index(BuildConfig("bm25", str(corpus), str(tmp_path / "built")))
    backend = build_retriever(RetrieverConfig("bm25", str(corpus), str(tmp_path / "built")))
    engine = Slow(backend, lambda query: random.Random(query).random() / 10)
    with running(create_app(engine, ServiceConfig(cache_entries=0))) as url:
        plain = play(url, speculate=False)
        num_plain = len(engine.queries)
        ahead = play(url, speculate=True)
    assert len(plain) == NUM_GROUPS * NUM_SAMPLES >= 50
    for one, other in zip(plain, ahead, strict=True):
        assert other.segments == one.segments and other.status is one.status
        assert other.faults == one.faults and not one.error
        assert {name: other.stats[name] for name in one.stats} == one.stats
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
class Fate:
    """A client whose answers name their query, after a while; predictions may fail."""

    seconds: dict[str, float]
    failing: frozenset[str] = frozenset()
    has_room_ahead: bool = True
    predicted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    most_open: int = 0
    _open: int = 0

    async def search(self, query: str, began: float | None = None) -> list[Document]:
        self.asked.append(query)
        await asyncio.sleep(self.seconds[query])
        return [Document.from_contents(query, query)]

    async def search_ahead(self, query: str) -> list[Document]:
        self.predicted.append(query)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
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
    """Whatever was predicted, by whom, how slow, and whether it failed; bounded, nothing twice."""
    seconds = {"ab": 0.0, "": 0.0} | {query: n / 1000 for query, n in ticks.items()}
    client = Fate(seconds, failing, has_room)
    group = Group()
    siblings = [Foresight(client, group) for _ in range(2)]  # type: ignore[arg-type]

    async def dialogue(number: int) -> None:
        for sibling, is_predicted, query in steps:
            if sibling != number:
                continue
            if is_predicted:
                siblings[number].predict(query)
            else:
                found = await siblings[number].search(query)
                assert [document.contents for document in found] == [query]

    async def main() -> None:
        await asyncio.gather(dialogue(0), dialogue(1))

    asyncio.run(main())
    searches = [query for _, is_predicted, query in steps if not is_predicted]
    assert client.most_open <= 2 * MOST_OPEN and (has_room or not client.predicted)
    assert not set(client.asked) - set(searches) and len(client.asked) <= len(searches)
    stats = Counter[str]()
    for one in siblings:
        stats.update(one.stats())
    assert stats["searches_ahead"] == len(client.predicted)
    assert stats["searches_ahead_used"] <= len(set(client.predicted) & set(searches))


def test_seconds_that_were_spared_are_counted() -> None:
    """A prediction sent 50 ms before its query, which takes 80 ms, spares 50."""

    async def main() -> dict[str, float]:
        foresight = Foresight(Fate({"a": 0.08, "b": 0.0}), Group())  # type: ignore[arg-type]
        foresight.predict("a")
        await asyncio.sleep(0.05)
        await foresight.search("a")
        await foresight.search("b")
        return foresight.stats()

    stats = asyncio.run(main())
    assert 0.045 < stats["search_wait_hidden_s"] < 0.08 and stats["search_wait_s"] < 0.06
    assert (stats["searches_ahead"], stats["searches_ahead_used"]) == (1, 1)


def test_a_dialogue_has_few_predictions_open() -> None:
    """Those beyond are not sent; when one was answered, there is room again."""

    async def main() -> Fate:
        client = Fate({str(n): 0.01 for n in range(10)})
        foresight = Foresight(client, Group())  # type: ignore[arg-type]
        for n in range(8):
            foresight.predict(str(n))
        await asyncio.sleep(0.05)
        foresight.predict("9")
        await asyncio.sleep(0.02)
        return client

    assert asyncio.run(main()).predicted == [*map(str, range(MOST_OPEN)), "9"]


def test_a_policy_that_asks_otherwise_is_rarely_foreseen_by_the_question() -> None:
    """Once that was wrong often enough it is rarely tried, until it was right again."""
    client = Fate({str(n): 0.0 for n in range(100)})
    right = NUM_QUESTIONS + EVERY - 1

    async def main() -> None:
        questions = Questions()
        for n in range(right + 2):
            one = Foresight(client, Group())  # type: ignore[arg-type]
            asked = questions.predict(one, str(n))
            await one.search(str(n) if n == right else "other")
            questions.judge(asked)

    client.seconds["other"] = 0.0
    asyncio.run(main())
    assert client.predicted == [*map(str, range(NUM_QUESTIONS)), str(right), str(right + 1)]


def test_what_a_group_knows_goes_with_its_last_dialogue() -> None:
    """Dialogues of one group share it; without a group, or without the option, none do."""

    async def main() -> None:
        client = RetrievalClient("http://127.0.0.1:9")
        tool = SearchTool(client, ServerConfig(speculate=True))
        prompt = Prompt("x", (1,), "test", ())
        one, two, alone, other = (
            tool.for_dialogue(start_trajectory(prompt, group=group)) for group in ("g", "g", "", "")
        )
        groups = [made.retrieval.group for made in (one, two, alone, other)]  # type: ignore[attr-defined]
        assert groups[0] is groups[1] and groups[2] is not groups[3]
        assert list(tool._groups) == ["g"]
        del one, two, groups
        assert not tool._groups
        assert SearchTool(client).for_dialogue(start_trajectory(prompt)).retrieval is client
        await client.aclose()

    asyncio.run(main())
