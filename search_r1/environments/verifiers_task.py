"""The search task as a verifiers environment: rows of our data, our retriever, exact match.

Written for verifiers 0.4; `search_r1_task` is the id of the taskset. Its own harness plays the
dialogue of `template=native` within the server's process; other harnesses get the same tool from
the toolset. An answer stands between <answer> and </answer>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

from search_r1.agent.search import SearchTool
from search_r1.retrieval.client import RetrievalClient
from search_r1.rewards.normalize import matches_exactly
from verl.agent.grammar import Grammar, answer_pattern
from verl.agent.native import WORDING
from verl.data.rows import load_rows

URL, TOPK = "http://127.0.0.1:8000/retrieve", 3
ANSWER = answer_pattern(Grammar())


class SearchToolConfig(vf.SharedToolsetConfig):  # type: ignore[misc] # mypy does not see verifiers
    """Where the documents come from."""

    retriever_url: str = URL
    topk: int = TOPK


class SearchTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which rows are asked, and of which retriever."""

    data: str = "example/data/train.parquet"
    tools: SearchToolConfig = SearchToolConfig()


class SearchData(vf.TaskData):  # type: ignore[misc]
    """A question with its accepted answers."""

    question: str
    answers: list[str]


class SearchTask(vf.Task[SearchData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One question."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def exact_match(self, task: SearchData, trace: vf.Trace) -> float:
        """Return 1.0 if the last message has an accepted answer between its tags."""
        found = ANSWER.findall(trace.last_reply)
        return float(bool(found) and matches_exactly(found[-1], task.answers))


class SearchToolset(vf.Toolset[SearchToolConfig, vf.State]):  # type: ignore[misc]
    """The tool `search`, for any harness that calls tools."""

    @cached_property
    def retrieval(self) -> RetrievalClient:
        return RetrievalClient(self.config.retriever_url, self.config.topk)

    @vf.tool  # type: ignore[untyped-decorator]
    async def search(self, query: str) -> str:
        """Searches a collection of documents and gives the best passages for a query."""
        return await passages(self.retrieval, query)


class SearchTaskset(vf.Taskset[SearchTask, SearchTasksetConfig]):  # type: ignore[misc]
    """The rows of a question file in the format of our data."""

    def load(self) -> Iterable[SearchTask]:
        for row in load_rows(self.config.data):
            question = str(row.extra_info.get("question") or "")
            asked = WORDING.user_prompt(question) if question else row.prompt
            yield SearchTask(
                SearchData(
                    prompt=asked if isinstance(asked, str) else [dict(m) for m in asked],
                    question=question, answers=list(row.ground_truth), id=row.uid,
                ),
                self.config.task,
            )  # fmt: skip

    @classmethod
    def toolsets(cls, config: SearchTasksetConfig) -> list[SearchToolset]:
        return [SearchToolset(config.tools)]


class SearchHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The retriever of the harness, which needs no server of tools."""

    retriever_url: str = URL
    topk: int = TOPK


class SearchHarness(vf.Harness[SearchHarnessConfig]):  # type: ignore[misc]
    """The built-in agent's dialogue, over whatever model verifiers gives it."""

    SUPPORTS_MCP = True  # its own tool takes the place of the toolset's
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def retrieval(self) -> RetrievalClient:
        return RetrievalClient(self.config.retriever_url, self.config.topk)

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str,
        secret: str, mcp_urls: dict[str, str], data: SearchData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:  # fmt: skip
        """Ask until there is an answer, search for each call, and complain of anything else."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [m.model_dump(exclude_none=True) for m in prompt or ()]
        async with AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, timeout=None
        ) as client:
            await self.converse(client, ctx.model, messages)
        return vf.ProgramResult(0, "", "")

    async def converse(self, client: AsyncOpenAI, model: str, messages: list[Any]) -> None:
        schemas: Any = [SearchTool(self.retrieval).schema]
        while True:
            reply = await client.chat.completions.create(
                model=model, messages=messages, tools=schemas
            )
            message = reply.choices[0].message
            if not message.tool_calls and ANSWER.search(message.content or ""):
                return
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
            calls: Any = message.tool_calls or ()
            for call in calls:
                result = await self.respond(call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not calls:
                messages.append({"role": "user", "content": WORDING.invalid_action})

    async def respond(self, call: Any) -> str:
        """Return the passages for a call, or what is wrong with it."""
        query = json.loads(call.arguments or "{}").get("query")
        if call.name != SearchTool.name or not isinstance(query, str):
            return f"got {call.name}({call.arguments}), expected {SearchTool.name}(query: text)"
        return await passages(self.retrieval, query)


async def passages(retrieval: RetrievalClient, query: str) -> str:
    """Return the passages for a query as the built-in agent shows them."""
    documents = await retrieval.search(query)
    return WORDING.items_text(documents).rstrip("\n")


if __name__ == "__main__":  # verifiers runs the module of a toolset as its server
    SearchToolset.run()
