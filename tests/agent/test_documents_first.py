"""Documents for the question itself, before the first turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from search_r1.agent.documents_first import DocumentsFirst, known_question
from search_r1.agent.generation import check_prompts, search_agent
from search_r1.agent.search import SearchTool
from search_r1.agent.tags import TEMPLATES
from search_r1.evaluation.methods import METHODS, method_agent
from search_r1.evaluation.runner import check_rows
from search_r1.experimental.replay.playing import Edit, replay_trajectory
from search_r1.inference.dialogue import AgentSession
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import EmptyRetrieval, Retrieval
from search_r1.retrieval.schema import Document
from search_r1.rewards.format import is_valid_dialogue
from search_r1.scoring import reward_input
from tests.core.agent.chat_templates import LLAMA, QWEN, ChatTokenizer
from tests.evaluation.scripted import row, runner
from tests.fakes import ByteTokenizer, ScriptedEngine, UnavailableRetriever, texts
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.native import NativeFormat
from verl.agent.tags import TagFormat
from verl.batch import TokenBatch
from verl.config import Config
from verl.errors import ConfigError, DataError
from verl.packing import PREFIXES, saved_token_share, share_prompts
from verl.types import Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

TOKENIZER = ByteTokenizer()
SHORT = TEMPLATES["short"]
PROMPT = Prompt("test#0", tuple(TOKENIZER.encode("Question: who?\n")), "test", ("x",),
                text="Question: who?\n")  # fmt: skip
OSLO = Document.from_title("1", "Oslo", "Oslo is a city in Norway.")
BERGEN = Document.from_title("2", "Bergen", "Bergen is a city by the sea.")
FOUND = InMemoryRetrieval({"who?": [OSLO], "more": [BERGEN]})
DOCUMENTS = '\n\n<information>Doc 1(Title: "Oslo") Oslo is a city in Norway.\n</information>\n\n'
SCRIPT = ("<think> a </think><search> more </search>", "<think> b </think><answer> x </answer>")


def documents_first(
    retrieval: Retrieval = FOUND, template: TagFormat = SHORT, config: Config | None = None,
    do_search: bool = True, **limits: Any,
) -> DocumentsFirst:  # fmt: skip
    """Build the agent for the byte tokenizer."""
    agent = search_agent(
        retrieval, TOKENIZER, Limits(max_response_length=400, **limits), template, do_search
    )
    return DocumentsFirst.over(agent, config or Config())


def play(agent: DialogueAgent, script: Any = SCRIPT, sample: int = 0) -> Trajectory:
    """Run one dialogue with a scripted policy."""
    start = start_trajectory(PROMPT, group="g", sample=sample, seed=1)
    return asyncio.run(agent.run(start, ScriptedEngine(script), Sampling(1)))


def test_the_documents_stand_before_the_first_turn() -> None:
    """They are an observation, the policy searches on, and statistics count its own searches."""
    done = play(documents_first())
    assert [s.origin.name for s in done.segments] == [
        "PROMPT", "OBSERVATION", "POLICY", "OBSERVATION", "POLICY",
    ]  # fmt: skip
    assert texts(done, Origin.OBSERVATION)[0] == DOCUMENTS
    assert done.stats["valid_searches"] == 1 and done.stats["turns"] == 2
    assert done.stats["observation_tokens"] == done.num_tokens_of(Origin.OBSERVATION)
    dialogue = reward_input(done, SHORT.tags)
    assert is_valid_dialogue(dialogue.segments)
    twice = [dialogue.segments[0], *dialogue.segments[1:2] * 2, *dialogue.segments[2:]]
    assert not is_valid_dialogue(twice)


def test_a_closed_thinking_part_stays_before_each_turn() -> None:
    """With `no_think_rl` the part follows the documents, once."""
    done = play(documents_first(no_think_rl=True), ["<answer> x </answer>"])
    assert [s.text for s in done.segments][1:3] == [DOCUMENTS, SHORT.closed_think]


def test_a_group_computes_them_once() -> None:
    """The prompt that a group shares reaches to the first sampled token."""
    group = [play(documents_first(), [f"<answer> {n} </answer>"], n) for n in range(4)]
    batch = TokenBatch.from_trajectories(group)
    share_prompts(batch)
    common = len(PROMPT.ids) + len(TOKENIZER.encode(DOCUMENTS))
    assert [prefixes[0][1] for prefixes in batch.columns[PREFIXES]] == [common] * 4
    assert saved_token_share(batch) == pytest.approx(3 * common / batch.num_tokens)


def test_infrastructure_that_fails_fails_the_dialogue() -> None:
    """A retriever that is away gives a FAILED trajectory with the fault counted; no turn."""
    done = play(documents_first(UnavailableRetriever()), [])
    assert done.status is Status.FAILED and done.faults["searches_failed"] == 1
    assert len(done.segments) == 1


def test_a_replay_takes_the_recorded_documents() -> None:
    """A replayed dialogue begins with the documents of the record; no retriever is asked."""
    recorded = play(documents_first())
    agent = search_agent(EmptyRetrieval(), TOKENIZER, Limits(max_response_length=400), SHORT)
    again = asyncio.run(
        replay_trajectory(agent, ScriptedEngine(SCRIPT[1:]), recorded, Edit(2), Sampling(1), 0)
    )
    assert again.ids == recorded.ids


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (QWEN + "{# <tool_call> #}", '<tool_call>\n{"name": "search", "arguments": '
         '{"query": "who?"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'),
        (LLAMA, '{"name": "search", "parameters": {"query": "who?"}}<|eot_id|>'
         '<|start_header_id|>ipython<|end_header_id|>\n\n"'),
    ],
)  # fmt: skip
def test_native_dialogues_begin_with_a_call_in_the_models_form(template: str, call: str) -> None:
    """The call reads as one of the policy, and the tool's message answers it."""
    end = "<|im_end|>" if template.startswith(QWEN) else "<|eot_id|>"
    tokenizer, tool = ChatTokenizer(template, end), SearchTool(FOUND)
    format = NativeFormat(tokenizer, (tool,))
    plain = DialogueAgent(Limits(), format, Environment((tool,)), tokenizer)
    [text] = texts(
        play(DocumentsFirst.over(plain, Config()), ["<answer> x </answer>"]), Origin.OBSERVATION
    )
    assert text.startswith(call) and "Oslo is a city" in text
    written = SimpleNamespace(text=text.partition(end)[0], ids=(256,))
    [parsed] = format.parse(written).calls  # type: ignore[arg-type]
    assert parsed.arguments == {"query": "who?"}


def test_what_cannot_work_is_refused() -> None:
    """No tool, no search, too small a context: each with the option to change."""
    small = Config()
    small.data.max_prompt_length = 2000
    plain = DialogueAgent(Limits(), SHORT, Environment(), TOKENIZER)
    with pytest.raises(ConfigError, match=r"agent\.name: .* no tool search"):
        DocumentsFirst.over(plain, Config())
    with pytest.raises(ConfigError, match=r"agent\.name: .*do_search"):
        documents_first(config=replace(Config(), do_search=False))
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=2548"):
        documents_first(config=small)


@pytest.mark.parametrize(
    ("text", "extra", "question"),
    [
        ("x", {"question": " who? "}, "who?"),
        ("Example. Question: a?\nQuestion: who is B?<|im_end|>\n", {}, "who is B?"),
        ("Question: who?</s>", {"question": ""}, "who?"),
        ("Question: who?\n", {"question": 3}, "who?"),
        ("who?", {}, None),
        ("Question: <|im_end|>", {}, None),
    ],
)
def test_the_question_of_a_row(text: str, extra: dict[str, Any], question: str | None) -> None:
    """It is `extra_info.question` or the line after `Question:`; else the row is refused."""
    prompt = replace(PROMPT, text=text, extra_info=extra)
    if question is not None:
        assert known_question(prompt) == question
        check_prompts(SHORT, [prompt], "documents_first")
        return
    with pytest.raises(DataError, match=r"test#0: .*extra_info\.question"):
        check_prompts(SHORT, [prompt], "documents_first")
    check_prompts(SHORT, [prompt])


def test_evaluations_and_sessions_have_the_same_dialogue() -> None:
    """A session knows the question it was asked, rows without one are refused, baselines differ."""
    agent = documents_first(InMemoryRetrieval({"who is it?": [OSLO]}))
    session = AgentSession(agent, ScriptedEngine(SCRIPT[1:]), TOKENIZER, Sampling(500), 0, 2000)
    prompt = session.render(({"role": "user", "content": "Who?"},))
    reply = asyncio.run(session.ask("who is it?", prompt))
    assert [(s.query, s.documents) for s in reply.searches] == [("who is it?", (OSLO,))]
    assert reply.to_json()["segments"][0] == {"origin": "observation", "text": DOCUMENTS}
    own = replace(runner(FOUND), agent=agent)
    check_rows([row(1)], own, 2000)
    with pytest.raises(DataError, match=r"extra_info\.question"):
        check_rows([replace(row(1), prompt="What?")], own, 2000)
    direct = method_agent(agent, METHODS["direct"])
    assert len(play(direct, SCRIPT[1:]).segments) == 2
