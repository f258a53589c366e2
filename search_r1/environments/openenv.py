"""An OpenEnv environment as the agent of a run: `agent.name=openenv:URL`.

The tools of the environment, or its action as the one tool `act`, are those of the built-in loop.
A dialogue is one session. Written against the protocol of openenv 0.10, whose client would
bring other versions of our packages; websockets, which uvicorn brings, is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from search_r1.retrying import Backoff
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.environment import Environment
from verl.agent.interface import Item, Observation, Tool, ToolCall, Turn
from verl.agent.native import NativeFormat
from verl.agent.schema import check_parameters
from verl.config import Config
from verl.config.agent import ServerConfig
from verl.engine import RolloutEngine
from verl.errors import ConfigError, ToolError, explain
from verl.proxies import client_settings, is_loopback
from verl.types import Origin, Sampling, Segment, Status, Trajectory

PREFIX = "openenv:"
FAILED = "environment_calls_failed"
"""Fault name: calls that the environment's server did not answer."""
REWARD = "environment_reward"
"""Statistic of a dialogue: the sum of the rewards of its steps."""
CONNECT_S = 1.5
"""Maximum seconds for each request that asks for the tools."""
MAX_MESSAGE = 100 * 2**20
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schemas of environments that list their tools."""
FULL = "CAPACITY_REACHED"
WAITS = Backoff(initial=0.1, maximum=2.0)
"""Between two attempts to get a session."""
OF_THE_POLICY = ("invalid_args", "tool_not_found", "execution_error")
"""Kinds of errors of a tool that the policy may read; the others are failures."""
FIX = "start it (python -m search_r1.environments.openenv_server), or correct the address"


class EpisodeOver(Exception):
    """The environment has ended the episode."""


@dataclass(frozen=True)
class EnvironmentServer:
    """The address of an environment's server, and the limits of requests to it."""

    url: str
    options: ServerConfig

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Return the server that `agent.name` names. Raises ConfigError for no address."""
        name = config.agent.name
        url = name.removeprefix(PREFIX).rstrip("/")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            expected = f"{PREFIX}http://HOST:PORT"
            raise ConfigError(explain("agent.name", name, expected, "write the server's address"))
        return cls(url, config.retriever)

    def tools(self) -> tuple[EnvironmentTool, ...]:
        """Ask for the tools. Raises ConfigError if no OpenEnv server answers."""
        try:
            action = self._request("GET", "/schema")["action"]
            listed = [described_action(action)]
            if action.get("title") in TOOL_ACTIONS:
                answer = self._request("POST", "/step", {"action": {"type": "list_tools"}})
                listed = answer["observation"]["tools"]
            tools = tuple(EnvironmentTool(self, described) for described in listed)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            got = f"{PREFIX}{self.url} ({type(error).__name__}: {error})"
            raise ConfigError(explain("agent.name", got, "an OpenEnv server", FIX)) from error
        for tool in tools:
            check_parameters(tool)
        return tools

    def problem(self, seconds: float) -> str:
        """Return why the server does not answer, or ''."""
        try:
            self._request("GET", "/health", seconds=seconds)
        except (httpx.HTTPError, ValueError) as error:
            return f"{self.url}: {type(error).__name__}: {error}"
        return ""

    def _request(
        self, method: str, path: str, body: object = None, seconds: float = CONNECT_S
    ) -> Any:
        with httpx.Client(**{**client_settings(self.url), "timeout": seconds}) as client:
            return client.request(method, self.url + path, json=body).raise_for_status().json()

    async def connect(self) -> ClientConnection:
        proxy: Literal[True] | None = None if is_loopback(httpx.URL(self.url).host) else True
        url = "ws" + self.url.removeprefix("http") + "/ws"
        seconds = self.options.timeout
        return await connect(url, open_timeout=seconds, max_size=MAX_MESSAGE, proxy=proxy)


class Session:
    """One episode: a connection, and the rewards so far."""

    def __init__(self, server: EnvironmentServer, start: Trajectory) -> None:
        self.server, self.reset = server, reset_values(start)
        self.total = 0.0
        self.socket: ClientConnection | None = None
        self.lock = asyncio.Lock()

    async def open(self) -> str:
        """Connect and reset, waiting while all sessions are taken; return what the policy sees."""
        options = self.server.options
        deadline = time.monotonic() + options.max_outage
        problem, failures = "", 0
        for attempt in itertools.count():
            try:
                self.socket = await self.server.connect()
                reply = await self._exchange("reset", self.reset)
            except (OSError, TimeoutError, WebSocketException) as error:
                problem = f"{type(error).__name__}: {error}"
                failures += 1
            else:
                if reply["type"] != "error":
                    return readable(reply["data"].get("observation") or {})
                problem = str(reply["data"].get("message"))
                if reply["data"].get("code") != FULL:
                    break
            await self.aclose()
            if failures > options.max_retries or time.monotonic() > deadline:
                break
            await asyncio.sleep(WAITS.delay(attempt))
        raise self._failure(problem, "start it, with as many sessions as concurrent dialogues")

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the observation, or the message about an action that the environment refuses.

        Raises EpisodeOver, or ToolError if the server fails.
        """
        async with self.lock:
            try:
                reply = await self._exchange("step", action)
            except (OSError, TimeoutError, WebSocketException) as error:
                problem = f"{type(error).__name__}: {error}"
                raise self._failure(problem, "see the server's log") from error
        data = reply["data"]
        if reply["type"] == "error":
            if data.get("code") == "VALIDATION_ERROR":
                return str(data.get("message"))
            raise self._failure(str(data.get("message")), "see the server's log")
        reward = data.get("reward")
        if not isinstance(reward, int | float | None) or not math.isfinite(reward or 0.0):
            raise self._failure(f"reward {reward!r}", "return a finite number or null as reward")
        self.total += float(reward or 0.0)
        if data.get("done"):
            raise EpisodeOver
        observation: dict[str, Any] = data.get("observation") or {}
        return observation

    async def aclose(self) -> None:
        """Close the connection, which ends the session."""
        if self.socket is not None:
            with contextlib.suppress(WebSocketException):  # the server may have ended it already
                await self.socket.send(json.dumps({"type": "close"}))
            await self.socket.close()
            self.socket = None

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self.socket is not None, "a step follows the reset"
        # A server without a free session says so and closes before it is asked.
        with contextlib.suppress(ConnectionClosed):
            await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = await asyncio.wait_for(self.socket.recv(), self.server.options.timeout)
        try:
            reply = json.loads(answer)
        except ValueError:  # also bytes that are no UTF-8
            reply = None
        is_reply = isinstance(reply, dict) and isinstance(reply.get("data"), dict)
        if not is_reply or not isinstance(reply.get("type"), str):
            raise self._failure(f"{answer[:200]!r}", "give the address of an OpenEnv server")
        return cast("dict[str, Any]", reply)

    def _failure(self, problem: str, fix: str) -> ToolError:
        subject = f"{PREFIX}{self.server.url}"
        return ToolError(explain(subject, problem, "an episode", fix), {FAILED: 1})


class EnvironmentTool(Tool):
    """A tool of the environment, bound to a session during a dialogue."""

    faults = (FAILED,)
    max_outage_option = "retriever.max_outage"
    fix = FIX

    def __init__(
        self, server: EnvironmentServer, described: Mapping[str, Any],
        session: Session | None = None,
    ) -> None:  # fmt: skip
        """`described`: name, description and input_schema; without a name: the action itself."""
        self.server, self.described, self.session = server, described, session
        self.is_action = "name" not in described
        self.name = str(described.get("name", "act"))
        self.description = str(described.get("description", ""))
        self.parameters = described["input_schema"]
        self.counted_as = "searches" if self.name == "search" else ""

    @property
    def max_outage(self) -> float:  # type: ignore[override]
        return self.server.options.max_outage

    def bound(self, session: Session) -> EnvironmentTool:
        return EnvironmentTool(self.server, self.described, session)

    async def call(self, **arguments: Any) -> Observation:
        """Take one step. Raises EpisodeOver, and ToolError if the server fails."""
        assert self.session is not None, "a dialogue binds its tools"
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        observation = await self.session.step(arguments if self.is_action else call)
        if isinstance(observation, str):
            return Observation((Item(f"Error: {observation}"),))
        if error := observation.get("error"):
            if isinstance(error, Mapping) and error.get("error_type") not in OF_THE_POLICY:
                raise ToolError(f"{self.label}: {error.get('message')}", {FAILED: 1})
            text = error.get("message") if isinstance(error, Mapping) else error
            return Observation((Item(f"Error: {text}"),))
        return Observation(tuple(items_of(observation)))

    def ended(self) -> Mapping[str, float]:
        return {} if self.session is None else {REWARD: self.session.total}

    def probe(self, seconds: float) -> str:
        return self.server.problem(seconds)


@dataclass(frozen=True)
class OpenEnvAgent(DialogueAgent):
    """The built-in loop over an environment, whose end of an episode ends the dialogue."""

    session: Session | None = None

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Run one dialogue in a session of its own."""
        servers = [t.server for t in self.environment.tools if isinstance(t, EnvironmentTool)]
        if not self.environment.enabled or not servers:
            return await super().run(start, engine, sampling)
        session = Session(servers[0], start)
        tools = tuple(
            tool.bound(session) if isinstance(tool, EnvironmentTool) else tool
            for tool in self.environment.tools
        )
        environment = replace(self.environment, tools=tools)
        agent = replace(self, environment=environment, session=session)
        try:
            return await super(OpenEnvAgent, agent).run(start, engine, sampling)
        finally:
            await session.aclose()

    async def _play(
        self, trajectory: Trajectory, engine: RolloutEngine, sampling: Sampling,
        counts: Counter[str],
    ) -> Status:  # fmt: skip
        if self.session is not None and (text := await self.session.open()):
            shown = self._first_observation(text)
            # A closed thinking part stays right before the first turn.
            trajectory.segments.insert(len(trajectory.segments) - bool(self._opening), shown)
            counts["observation_tokens"] += len(shown.ids)
        try:
            return await super()._play(trajectory, engine, sampling, counts)
        except EpisodeOver:
            return Status.ANSWERED

    def _first_observation(self, text: str) -> Segment:
        """Return what `reset` shows, cut to fit, as an observation before the first turn."""
        turn = Turn((ToolCall(self.environment.tools[0].name, ""),))
        results, reserved = self.fit(turn, [[Item(text)]]), self.reserved or ()
        if isinstance(self.format, NativeFormat):  # a message, since no call was written
            wording = self.format.wording
            content = wording.items_text(results[0], reserved).rstrip("\n")
            format = replace(self.format, wording=replace(wording, invalid_action=content))
            written = format.respond(Turn(is_open=True), None, reserved)
        else:
            written = self.format.respond(turn, results, reserved)
        return self._encoded_segment(Origin.OBSERVATION, written)


def build_environment(config: Config) -> Environment:
    """Build the tools of a run's environment. Raises ConfigError if its server does not answer."""
    return Environment(EnvironmentServer.of_run(config).tools(), enabled=config.do_search)


def build_agent(config: Config) -> OpenEnvAgent:
    """Build the agent of a run."""
    from search_r1.agent.generation import build_dialogue  # noqa: PLC0415 - which names this module

    return over(build_dialogue(config))


def over(agent: DialogueAgent) -> OpenEnvAgent:
    """Return the agent whose dialogues are sessions of its environment."""
    return OpenEnvAgent(
        agent.limits, agent.format, agent.environment, agent.tokenizer, agent.reserved
    )


def described_action(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an environment's action as the description of a tool."""
    properties = {n: part for n, part in schema["properties"].items() if n != "metadata"}
    return {
        "description": str(schema.get("description", "Acts in the environment.")).strip(),
        "input_schema": {**schema, "properties": properties},
    }


def reset_values(start: Trajectory) -> dict[str, Any]:
    """Return what `reset` gets: the same for all samples of a row.

    A seed, the question and its accepted answers, and the values of `extra_info.reset`.
    """
    prompt = start.prompt
    own = prompt.extra_info.get("reset") or {}
    return {
        "seed": derived_seed(prompt.uid),
        "question": str(prompt.extra_info.get("question") or prompt.text),
        "ground_truth": list(prompt.ground_truth),
        **{name: value for name, value in own.items() if value is not None},
    }


def items_of(observation: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of an observation: each passage of a tool's result, or the whole as text."""
    result = observation["result"] if "tool_name" in observation else observation
    if isinstance(result, Mapping) and result.get("data") is not None:
        result = result["data"]  # the form of FastMCP
    if isinstance(result, list) and all(is_passage(entry) for entry in result):
        for entry in result:
            yield Item(entry["text"], entry.get("title"), entry.get("id"), source=entry)
    elif text := readable(result):
        yield Item(text)


def is_passage(entry: object) -> bool:
    """Whether an entry of a result has a text, and a title if any, of its own."""
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("text"), str)
        and isinstance(entry.get("title"), str | None)
        and isinstance(entry.get("id"), str | None)
    )


def readable(value: Any) -> str:
    """Return a value as the policy reads it: a text as it is, a single text alone, else JSON.

    *Example*: `{"message": "hot", "hint": ""}` gives `"hot"`.
    """
    if isinstance(value, Mapping):
        told = {name: part for name, part in value.items() if part not in (None, "", [], {})}
        if len(told) == 1 and isinstance(only := next(iter(told.values())), str):
            return only
        value = told
    if isinstance(value, str):
        return value
    return "" if value in (None, [], {}) else json.dumps(value, ensure_ascii=False)
