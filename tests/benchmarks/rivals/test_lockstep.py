"""Dialogues that are sampled together by a model's own `generate`, as TRL samples."""

import asyncio
import json

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.algorithms.runner import BASE
from benchmarks.rivals.lockstep import Lockstep
from example.geography import CORPUS, DATA
from search_r1.agent.generation import search_agent
from search_r1.agent.tags import SHORT
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from verl.agent.dialogue import DialogueAgent, Limits
from verl.ext.engines.transformers import TransformersEngine
from verl.types import Origin, Prompt, Sampling, Trajectory, start_trajectory

LENGTH = 48


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def lockstep(tokenizer: AutoTokenizer) -> Lockstep:
    return Lockstep(AutoModelForCausalLM.from_pretrained(BASE), tokenizer)


def agent_of(tokenizer: AutoTokenizer) -> DialogueAgent:
    """An agent that searches the example's corpus by shared words."""
    rows = map(json.loads, CORPUS.read_text().splitlines())
    retrieval = InMemoryRetrieval([Document.from_mapping(row) for row in rows], 1)
    limits = Limits(max_turns=3, max_response_length=LENGTH, max_obs_length=96)
    return search_agent(retrieval, tokenizer, limits, SHORT)  # type: ignore[arg-type]


def starts(tokenizer: AutoTokenizer) -> list[Trajectory]:
    """Some held-out questions of the example."""
    rows = pq.read_table(DATA / "val.parquet").to_pylist()[::15]
    texts = [row["prompt"][0]["content"] + "\n" for row in rows]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]  # type: ignore[attr-defined]
    prompts = [Prompt(text, tuple(row), "geo", ()) for text, row in zip(texts, ids, strict=True)]
    return [start_trajectory(prompt) for prompt in prompts]


def test_greedy_dialogues_are_those_of_our_engine(
    lockstep: Lockstep, tokenizer: AutoTokenizer
) -> None:
    """The same ids, although prompts are padded and dialogues end after different turns."""
    greedy = Sampling(LENGTH, temperature=0.0)

    async def alone() -> list[Trajectory]:
        engine, agent = TransformersEngine(str(BASE), "cpu", "float32"), agent_of(tokenizer)
        await engine.start()
        return [await agent.run(start, engine, greedy) for start in starts(tokenizer)]

    expected = asyncio.run(alone())
    played = lockstep.play(agent_of(tokenizer), starts(tokenizer), greedy)
    assert [[s.ids for s in t.segments] for t in played] == [
        [s.ids for s in t.segments] for t in expected
    ]
    assert len({len(t.segments) for t in played}) > 1, "every dialogue has as many turns"


def test_sampled_turns_end_where_they_should(lockstep: Lockstep, tokenizer: AutoTokenizer) -> None:
    """With a stop string or the end of sequence, and never with padding after it."""
    played = lockstep.play(agent_of(tokenizer), starts(tokenizer) * 4, Sampling(LENGTH))
    turns = [s for t in played for s in t.segments if s.origin is Origin.POLICY]
    assert len({len(turn.ids) for turn in turns}) > 1, "there was nothing to pad"
    for turn in turns:
        end = tokenizer.eos_token_id  # type: ignore[attr-defined]
        assert end not in turn.ids[:-1]
        stops = turn.text.endswith(SHORT.stop) or turn.ids[-1] == end
        assert stops or len(turn.ids) == LENGTH
        assert not any(tag in turn.text[:-1] for tag in SHORT.stop)
