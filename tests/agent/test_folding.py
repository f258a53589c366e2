"""The agent that drops documents of earlier turns where its context is full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from search_r1.agent.folding import Folding
from search_r1.agent.generation import AGENTS, search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from tests.core.agent.chat_templates import QWEN, ChatTokenizer
from tests.fakes import ByteTokenizer, ScriptedEngine, texts
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.native import NativeFormat
from verl.batch import ROW_STARTS, TokenBatch
from verl.config import Config
from verl.errors import ConfigError
from verl.ext.guard import correct_trajectories
from verl.packing import as_rows
from verl.types import Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

TOKENIZER = ByteTokenizer()
PROMPT = Prompt("test#0", tuple(TOKENIZER.encode("Who?\n")), "test", ("x",), text="Who?\n")
FOUND = InMemoryRetrieval(
    {name: [Document.from_title(name, name, name * 150)] for name in ("a", "b", "c")}
)
SCRIPT = [f"<think> {n} </think><search> {n} </search>" for n in "abc"]
SCRIPT.append("<think> d </think><answer> x </answer>")


def dialogue(longest: int) -> DialogueAgent:
    """Return the built-in loop with a context of `longest` bytes."""
    limits = Limits(max_turns=3, max_response_length=100, max_prompt_length=longest)
    return search_agent(FOUND, TOKENIZER, limits, TEMPLATES["short"], True)


def folding(agent: DialogueAgent) -> DialogueAgent:
    """Return the same agent with folding."""
    return Folding.over(agent, Config())


def play(agent: DialogueAgent) -> tuple[Trajectory, list[Any]]:
    """Return the dialogue and the contexts that the engine was given."""
    engine = ScriptedEngine(SCRIPT)
    start = start_trajectory(PROMPT, "g")
    done = asyncio.run(agent.run(start, engine, Sampling(max_tokens=100)))
    return done, [request.prompt_ids for request in engine.requests]


def test_documents_leave_a_full_context_and_what_was_written_stays() -> None:
    """The built-in loop ends there; with enough room there is one row, as in the built-in loop."""
    assert play(dialogue(400))[0].status is Status.OUT_OF_BUDGET
    wide = dialogue(4000)
    assert play(folding(wide))[0].segments == play(wide)[0].segments
    done, contexts = play(folding(dialogue(400)))
    assert (done.status, done.stats["rows"], done.stats["valid_searches"]) == (
        Status.ANSWERED,
        3,
        3,
    )
    assert texts(done, Origin.POLICY) == SCRIPT
    shown = [TOKENIZER.decode(context) for context in contexts]
    assert "aaaa" in shown[1] and "aaaa" not in shown[2] and "bbbb" in shown[2]
    assert shown[3].startswith("Who?\n" + "".join(SCRIPT[:3])) and "cccc" in shown[3]
    assert max(map(len, contexts)) <= 400


def test_what_is_trained_on_is_what_the_engine_was_given() -> None:
    """Each row of the batch is a context and the turn sampled in it; each turn is trained once."""
    done, contexts = play(folding(dialogue(400)))
    batch = TokenBatch.from_trajectories([done, done])
    assert len(batch) == 2 and int(batch.tokens[ROW_STARTS].sum()) == 4
    rows = as_rows(batch)
    expected = [[*c, *TOKENIZER.encode(said)] for c, said in zip(contexts, SCRIPT, strict=True)]
    # The first row has two turns, since the prompt and a document fit.
    assert [row.tolist() for row in rows.sequences("input_ids")] == expected[1:] * 2
    assert int(batch.tokens["policy_mask"].sum()) == 2 * len("".join(SCRIPT))


def test_the_guard_compares_each_row_with_what_the_engine_saw() -> None:
    """Its forward pass has the batch's rows: as one, later turns would see dropped documents."""
    done, _ = play(folding(dialogue(400)))
    batch = TokenBatch.from_trajectories([done, done])
    batch.rows["scores"] = torch.ones(2)
    chosen = as_rows(correct_trajectories(batch, 16)).sequences("input_ids")
    assert [row.tolist() for row in chosen] == [
        row.tolist() for row in as_rows(batch).sequences("input_ids")
    ]


def test_a_context_that_is_still_too_long_ends_the_dialogue() -> None:
    """As in the built-in loop."""
    done, _ = play(folding(dialogue(150)))
    assert (done.status, done.stats["rows"]) == (Status.OUT_OF_BUDGET, 1)


def test_templates_of_messages_are_refused() -> None:
    """They have no place for a turn without its result."""
    tokenizer = ChatTokenizer(QWEN)
    native = NativeFormat(tokenizer, ())
    with pytest.raises(ConfigError, match=r"^agent\.name: got folding with template="):
        folding(DialogueAgent(Limits(), native, Environment(), tokenizer, ()))
    assert "folding" in AGENTS
