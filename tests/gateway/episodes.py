"""Episodes of a scripted policy through the gateway, and through the native agent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openai import AsyncOpenAI, OpenAI

from search_r1.agent.search import SearchTool
from search_r1.gateway.agent import LoopAgent
from search_r1.gateway.episode import Policy
from search_r1.gateway.history import Renderer
from search_r1.gateway.loops import GIVEN, UserLoop
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from tests.core.agent.chat_templates import QWEN, ChatTokenizer
from tests.fakes import ScriptedEngine
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.environment import Environment
from verl.agent.interface import Agent
from verl.agent.native import WORDING, NativeFormat
from verl.data.prompts import render
from verl.data.rows import Row
from verl.engine import Listener
from verl.types import Completion, Prompt, Sampling, Trajectory, start_trajectory

END = "<|im_end|>"
TOKENIZER = ChatTokenizer(QWEN)
WORDS = ("oslo", "bergen", "norway", "fjord", "ünïcode", "<answer>no</answer>", "<|im_start|>")
DOCUMENTS = [
    Document.from_title(str(n), f"{a} {b}".title(), f"{a} is near {b}. {b * (1 + n % 5)}")
    for n, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS if a != b)
]
RETRIEVAL = InMemoryRetrieval(DOCUMENTS)
TOOL = SearchTool(RETRIEVAL)
TOOLS: Any = [TOOL.schema]
LIMITS = Limits(max_turns=3, max_response_length=300, max_obs_length=4000, max_prompt_length=4500)
SAMPLING = Sampling(LIMITS.max_response_length)
INVALID = WORDING.invalid_action


class StreamedEngine(ScriptedEngine):
    """Streams its texts in pieces of three characters."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        completion = await self.generate(prompt_ids, sampling)
        for start in range(0, len(completion.text), 3):
            listener(completion.text[start : start + 3])
        return completion


def call(query: str) -> str:
    """Return a call of the tool as the policy writes it."""
    asked = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"<tool_call>\n{asked}\n</tool_call>"


def scripts(num: int) -> list[list[str]]:
    """Return random episodes: calls, several at once, mistakes of form, answers, and open turns."""
    choices = random.Random(5)

    def turn() -> str:
        query = " ".join(choices.choices(WORDS[:-2], k=choices.randint(1, 3)))
        asked = call(query)
        text = choices.choices(
            [asked, f"I look for it.\n{asked}", f"{asked}\n{call('sea')}", "<think>nothing",
             "<tool_call>{</tool_call>", f"<answer>{query}</answer>", f"{asked}<tool_call>"],
            weights=[4, 2, 2, 1, 1, 2, 1],
        )[0]  # fmt: skip
        return text + END * (choices.random() < 0.8)

    return [[turn() for _ in range(4)] for _ in range(num)]


def text_of(documents: Sequence[Document]) -> str:
    """Return documents as the native agent writes them."""
    shown = (f'Doc {n}(Title: "{d.title}", id: {d.id}) {d.text.strip()}\n'
             for n, d in enumerate(documents, 1))  # fmt: skip
    return "".join(shown).rstrip("\n")


async def converse(ask: Callable[[list[Any]], Awaitable[Any]], question: str) -> None:
    """Ask until there is an answer, search for each call, and complain of anything else."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        message = await ask(messages)
        if not message.tool_calls and "<answer>" in (message.content or ""):
            return
        messages.append(message.model_dump(exclude={"parsed"}))
        for asked in message.tool_calls or ():
            found = text_of(await RETRIEVAL.search(json.loads(asked.function.arguments)["query"]))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": found})
        if not message.tool_calls:
            messages.append({"role": "user", "content": INVALID})


async def search_loop(client: AsyncOpenAI, question: str) -> None:
    """A loop with the client that it is given."""

    async def ask(messages: list[Any]) -> Any:
        reply = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
        return reply.choices[0].message

    await converse(ask, question)


async def streamed_loop(base_url: str, api_key: str, question: str) -> None:
    """A loop that reads streams, with a client of its own."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600) as client:

        async def ask(messages: list[Any]) -> Any:
            completions = client.chat.completions
            async with completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
                return (await stream.get_final_completion()).choices[0].message

        await converse(ask, question)


def threaded_loop(client: OpenAI, question: str) -> None:
    """A loop with the synchronous client."""

    async def ask(messages: list[Any]) -> Any:
        reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return reply.choices[0].message

    asyncio.run(converse(ask, question))


def native_agent(limits: Limits = LIMITS) -> DialogueAgent:
    """The built-in agent in the model's own form."""
    format = NativeFormat(TOKENIZER, (TOOL,))
    return DialogueAgent(limits, format, Environment((TOOL,)), TOKENIZER)


def loop_agent(function: Callable[..., Any], limits: Limits = LIMITS) -> LoopAgent:
    """The agent over a loop."""
    format = NativeFormat(TOKENIZER, ())
    opening = format.closed_think if limits.no_think_rl else ""
    policy = Policy(limits, Renderer(TOKENIZER, format.tags, opening), format, format, SAMPLING)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    loop = UserLoop("loop:test", function, tuple(name for name in names if name in GIVEN))
    return LoopAgent(loop, policy)


def start(number: int = 0) -> Trajectory:
    """Return an episode's prompt, as the data of a run has it."""
    question = f"Who is number {number}?"
    row = Row("t", number, ({"role": "user", "content": question},), "t", ("x",))
    prompt: Prompt = render(row, TOKENIZER, [TOOL.schema])
    prompt = Prompt(prompt.uid, prompt.ids, "t", ("x",), {"question": question}, prompt.text)
    return start_trajectory(prompt, group=str(number), sample=0, seed=number)


async def play(
    agent: Agent, script: Sequence[str], number: int = 0, engine: type[ScriptedEngine] | None = None
) -> Trajectory:
    """Play one episode of a scripted policy."""
    made = (engine or ScriptedEngine)(script, tokenizer=TOKENIZER)  # type: ignore[arg-type]
    return await agent.run(start(number), made, SAMPLING)


async def play_all(
    agent: Agent, dialogues: Sequence[Sequence[str]], engine: type[ScriptedEngine] | None = None
) -> list[Trajectory]:
    """Play all episodes, sixteen at a time."""
    gate = asyncio.Semaphore(16)

    async def one(number: int, script: Sequence[str]) -> Trajectory:
        async with gate:
            return await play(agent, script, number, engine)

    return await asyncio.gather(*(one(n, script) for n, script in enumerate(dialogues)))
