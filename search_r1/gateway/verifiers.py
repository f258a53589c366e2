"""A verifiers environment as the agent of a run: `agent.name=verifiers:tcp://HOST:PORT`.

Its server plays an episode with its own harness, which asks the policy through the gateway, and
answers with the rewards. Written against the protocol of verifiers 0.4 (msgpack over ZeroMQ), whose
package would bring other versions of ours; pyzmq and msgpack, which vLLM brings, are enough.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import msgpack
import zmq
import zmq.asyncio

from search_r1.gateway.agent import LoopAgent, policy_of, tokenizer_of
from search_r1.gateway.loops import UserLoop
from search_r1.gateway.service import MODEL
from verl.agent.environment import Environment
from verl.config import Config
from verl.errors import ConfigError, explain

PREFIX = "verifiers:"
OPTION = "agent.name"
CONNECT_MS = 1500
"""Maximum milliseconds for the first answer of the server."""
BEAT_S, SILENCE_S = 10.0, 60.0
"""Seconds between questions whether a server still lives; silence after which it is gone."""
KEY_VARIABLE = "SEARCH_R1_GATEWAY"
"""Environment variable from which the server would read a key; the address holds it already."""
FIX = "start it (python -m search_r1.environments.verifiers_server TASKSET), or correct the address"


class EpisodeFailed(Exception):
    """The environment's server did not play the episode to its end."""


@dataclass
class Assembly:
    """What has arrived of an episode: each trace's rewards, and the reply at the end."""

    rewards: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reply: Mapping[str, Any] | None = None

    def add(self, delta: Mapping[str, Any]) -> None:
        """Note a change of a trace."""
        if delta.get("discard"):
            self.rewards.pop(delta["trace"], None)
            return
        rewards = self.rewards.setdefault(delta["trace"], {})
        self.rewards[delta["trace"]] = delta.get("set", {}).get("rewards", rewards)

    def reward(self) -> float:
        """Return the sum of the episode's rewards. Raises EpisodeFailed for a failure."""
        reply: Mapping[str, Any] = self.reply or {}
        if not reply.get("success"):
            raise EpisodeFailed(str(reply.get("error")))
        head: Mapping[str, Any] = reply.get("head") or {}
        if not head.get("ok"):
            errors = [f"{e.get('type')}: {e.get('message')}" for e in head.get("errors") or ()]
            raise EpisodeFailed("; ".join(errors) or "an agent of the episode failed")
        if len(self.rewards) != 1:
            raise EpisodeFailed(
                f"the episode has {len(self.rewards)} traces; expected one: environments of "
                "several agents cannot be trained yet"
            )
        [rewards] = self.rewards.values()
        if missing := [name for name, reward in rewards.items() if reward is None]:
            raise EpisodeFailed(f"the environment did not compute its reward {missing[0]}")
        return float(sum(r["score"] * r.get("weight", 1.0) for r in rewards.values()))


@dataclass
class EnvironmentAddress:
    """The address of an environment's server, and one connection for each event loop."""

    url: str
    sockets: dict[asyncio.AbstractEventLoop, zmq.asyncio.Socket] = field(default_factory=dict)
    waiting: dict[bytes, asyncio.Queue[tuple[bytes, bytes]]] = field(default_factory=dict)
    readers: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def of_run(cls, config: Config) -> Self:
        """Return the server that `agent.name` names. Raises ConfigError for no address."""
        name = config.agent.name
        try:
            parsed = urlsplit(name.removeprefix(PREFIX))
            is_address = parsed.scheme == "tcp" and parsed.hostname and parsed.port
        except ValueError:
            is_address = False
        if not is_address:
            expected = f"{PREFIX}tcp://HOST:PORT"
            raise ConfigError(explain(OPTION, name, expected, "write the server's address"))
        return cls(name.removeprefix(PREFIX))

    def check(self) -> None:
        """Raise ConfigError if no server of verifiers answers."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.url)
            socket.send_multipart([b"health", b"health", msgpack.packb({})])
            if not socket.poll(CONNECT_MS):
                got = f"{PREFIX}{self.url}, which does not answer"
                raise ConfigError(explain(OPTION, got, "a server of verifiers 0.4", FIX))
            frames = socket.recv_multipart()
            if len(frames) != 3:
                got = f"{PREFIX}{self.url}, which speaks another protocol"
                raise ConfigError(explain(OPTION, got, "a server of verifiers 0.4", FIX))

    async def play(self, base_url: str, extra_info: Mapping[str, Any]) -> float:
        """Have an episode played against the gateway; return its reward."""
        task = extra_info.get("task")
        if not isinstance(task, str):
            raise EpisodeFailed(
                "the row has no extra_info.task; expected rows of "
                "`python -m search_r1.environments.verifiers_server TASKSET --rows FILE`"
            )
        client = {"type": "eval", "base_url": base_url, "api_key_var": KEY_VARIABLE}
        request = {"task_data": json.loads(task), "client": client, "model": MODEL, "sampling": {}}
        frames, assembly = await self._send(b"run", request), Assembly()
        key = frames[0]
        try:
            while assembly.reply is None:
                kind, data = await self._next(key)
                content = msgpack.unpackb(data, raw=False, strict_map_key=False)
                if kind == b"delta":
                    assembly.add(content)
                else:
                    assembly.reply = content
        except asyncio.CancelledError:
            cancelled = await self._send(b"cancel", {"request_id": key.decode()})
            self.waiting.pop(cancelled[0])  # the answer is of no interest
            raise
        finally:
            self.waiting.pop(key, None)
        return assembly.reward()

    async def _send(self, method: bytes, content: Mapping[str, Any]) -> Sequence[bytes]:
        key = uuid.uuid4().hex.encode()
        self.waiting[key] = asyncio.Queue()
        frames = [key, method, msgpack.packb(content)]
        await self._socket().send_multipart(frames)
        return frames

    async def _next(self, key: bytes) -> tuple[bytes, bytes]:
        """Return what comes next for a request; asks meanwhile whether the server lives."""
        silent = 0.0
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    return await self.waiting[key].get()
            except TimeoutError:
                silent = 0.0 if await self._lives() else silent + BEAT_S
            if silent >= SILENCE_S:
                raise EpisodeFailed(f"{self.url} has not answered for {SILENCE_S:g} s")

    async def _lives(self) -> bool:
        frames = await self._send(b"health", {})
        try:
            async with asyncio.timeout(BEAT_S):
                await self.waiting[frames[0]].get()
        except TimeoutError:
            return False
        finally:
            self.waiting.pop(frames[0], None)
        return True

    def _socket(self) -> zmq.asyncio.Socket:
        """Return the running event loop's connection, whose answers are handed out by a task."""
        loop = asyncio.get_running_loop()
        if loop not in self.sockets:
            socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
                socket.setsockopt(option, value)
            socket.connect(self.url)
            self.sockets[loop] = socket
            task = loop.create_task(self._read(socket))
            self.readers.add(task)
        return self.sockets[loop]

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                key, kind, data = await socket.recv_multipart()
                if (queue := self.waiting.get(key)) is not None:
                    queue.put_nowait((kind, data))
        finally:
            socket.close()


def build_agent(config: Config) -> LoopAgent:
    """Build the agent of a run. Raises ConfigError for a server or a model that cannot work."""
    address = EnvironmentAddress.of_run(config)
    tokenizer = tokenizer_of(config)
    loop = UserLoop(config.agent.name, address.play, ("base_url", "extra_info"))
    return LoopAgent(loop, policy_of(config, tokenizer))


def build_environment(config: Config) -> Environment:
    """Return no tools, since the environment has its own. Raises ConfigError without a server."""
    EnvironmentAddress.of_run(config).check()
    return Environment(enabled=config.do_search)
